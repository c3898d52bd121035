// What is left of X when the flat kernel begins: it makes that flat itself, while it computes tiles that do not read it
// (FlatRest of flat_params.h). Warps that have time take units, an octet of a chunk of rows each, and count them; who
// brings a tile's input waits until all units of its chunks are counted. Any block may take any unit, in their order,
// so no block waits for one that does not run.
#pragma once

#include "divide.cuh"
#include "flat_params.h"
#include "flatten.cuh"
#include "intrinsics.cuh"
#include "magnitude.cuh"

namespace sparseconv::cuda {

// Of a chunk: how many of its octets are flat, and behind that, what was seen of floats.
__device__ __forceinline__ unsigned* FlatProgress(const FlatRest& rest, int chunk) {
  return rest.progress + 1 + 2 * (chunk - rest.first_chunk);
}

// A warp that makes units flat, as long as there are any: the units it takes, and the slots of shared memory to which
// their rows come. While one is made flat, the next is on its way, and it is being found out which one is behind that.
// To be used by all lanes together. T is the type of X, Half or float.
template <class T>
class FlatRestWarp {
 public:
  __device__ __forceinline__ FlatRestWarp(const FlatRest& rest, Shared slots) : rest_(rest), slots_(slots) {}

  // To be called by one thread for each slot, before others use them.
  static __device__ __forceinline__ void InitSlot(const FlatRest& rest, Shared slots, unsigned slot) {
    InitBarrier(slots + slot * SlotBytes(rest), 1);
  }
  static __device__ __forceinline__ unsigned SlotBytes(const FlatRest& rest) {
    return kFlatRestHeader + static_cast<unsigned>(8 * rest.flatten.channel_bytes);
  }

  // When the launch before is complete.
  __device__ __forceinline__ void Begin() {
    if (rest_.num_units == 0) return;
    Unit first(Uniform(TakeUnit()), rest_);
    next_ = Unit(Uniform(TakeUnit()), rest_);
    unit_ = first.number;
    rows_ = Bring(first);
  }

  __device__ __forceinline__ bool HasUnit() const { return unit_ < rest_.num_units; }

  __device__ __forceinline__ void MakeUnitFlat() {
    __syncwarp();  // all lanes have read the slot
    slot_ ^= 1u;
    const FlatRows<T> next_rows = Bring(next_);
    const unsigned taken = TakeUnit();
    Count();
    const unsigned slot = slot_ ^ 1u;
    WaitForBarrier(Arrived(slot), parities_ >> slot & 1u);
    parities_ ^= 1u << slot;
    Magnitude magnitude;
    rows_.template Write<kPixelsAtOnce>(rest_.flatten, static_cast<int>(threadIdx.x % 32), 32, magnitude);
    written_ = unit_;
    seen_ = magnitude.Seen();
    rows_ = next_rows;
    unit_ = next_.number;
    next_ = Unit(Uniform(taken), rest_);
  }

  // Lets those go on that wait for the unit that was written last. A while later, all of it has arrived in memory.
  __device__ __forceinline__ void Count() {
    if (written_ >= rest_.num_units) return;
    unsigned* progress = FlatProgress(rest_, rest_.first_chunk + Divide(static_cast<int>(written_), rest_.by_octets));
    FenceMemoryForCopyEngine();
    const unsigned seen = kIsFloat ? OrInWarp(seen_) : 0;
    __syncwarp();
    written_ = kNoUnit;
    if (threadIdx.x % 32 != 0) return;
    if (kIsFloat) OrAtomic(progress + 1, seen);
    AddReleased(progress, 1);
  }

 private:
  static_assert(kFlatRestSlots == 2);
  static constexpr int kPixelsAtOnce = 4;
  static constexpr unsigned kNoUnit = 0xFFFFFFFFu;
  static constexpr bool kIsFloat = sizeof(T) == sizeof(float);

  // A unit, and where it is.
  struct Unit {
    unsigned number = kNoUnit;
    int chunk = 0, octet = 0, channel = 0;

    Unit() = default;
    __device__ __forceinline__ Unit(unsigned taken, const FlatRest& rest) : number(taken) {
      if (taken >= rest.num_units) return;
      chunk = Divide(static_cast<int>(taken), rest.by_octets);
      octet = static_cast<int>(taken) - chunk * rest.flatten.num_octets;
      chunk += rest.first_chunk;
      channel = FlatRows<T>::ChannelOf(rest.flatten, octet);
    }
  };

  // The next one, in the first lane.
  __device__ __forceinline__ unsigned TakeUnit() const {
    return threadIdx.x % 32 == 0 ? AddAtomic(rest_.progress, 1) : 0;
  }

  __device__ __forceinline__ Shared Arrived(unsigned slot) const { return slots_ + slot * SlotBytes(rest_); }

  // What belongs to a unit, of which the copies are on their way then; nothing where there is no such unit.
  __device__ __forceinline__ FlatRows<T> Bring(const Unit& unit) const {
    if (unit.number >= rest_.num_units) return {};
    const Shared arrived = Arrived(slot_), room = arrived + kFlatRestHeader;
    const FlatRows<T> rows(rest_.flatten, unit.chunk, unit.octet, unit.channel, room);
    rows.Bring(rest_.flatten, room, arrived);
    return rows;
  }

  const FlatRest& rest_;
  const Shared slots_;
  unsigned unit_ = kNoUnit;  // whose rows are in the slot before, or on their way there
  FlatRows<T> rows_{};
  Unit next_;
  unsigned slot_ = 0, parities_ = 0;
  unsigned written_ = kNoUnit, seen_ = 0;  // not counted yet
};

// Who reads flat X, some of which may not be there yet: one thread, from lower pixels to higher ones.
class FlatRestReader {
 public:
  __device__ __forceinline__ explicit FlatRestReader(const FlatRest& rest) : rest_(rest) {}

  // Until the pixels from `first` to `last` are flat.
  __device__ __forceinline__ void WaitForPixels(int first, int last) {
    if (rest_.num_units == 0) return;
    const int end = ChunkOf(last) + 1;
    if (flat_ >= end) return;
    for (int chunk = max(max(flat_, ChunkOf(first)), rest_.first_chunk); chunk < end; ++chunk) {
      const unsigned* progress = FlatProgress(rest_, chunk);
      WaitForCount(progress, static_cast<unsigned>(rest_.flatten.num_octets));
      seen_ |= LoadWritten(progress + 1);
    }
    flat_ = end;
    FenceMemoryForCopyEngine();
  }

  // Of floats that were waited for.
  __device__ __forceinline__ unsigned seen() const { return seen_; }

 private:
  // Of rows of all images, that has a pixel; the last one where that is behind all.
  __device__ __forceinline__ int ChunkOf(int pixel) const {
    const FlattenParams& p = rest_.flatten;
    const int image = Divide(pixel, p.image.by_pixels);
    if (image >= p.batch) return p.batch * p.chunks - 1;
    const int row = Divide(pixel - image * p.image.rows * p.image.row_pixels, p.image.by_row_pixels);
    return image * p.chunks + row / p.chunk_rows;
  }

  const FlatRest& rest_;
  int flat_ = 0;  // chunks, of which all that tiles read are
  unsigned seen_ = 0;
};

}  // namespace sparseconv::cuda
