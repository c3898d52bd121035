// Sparse convolution of windows of many channels by warpgroups of sparse tensor cores (sm_90a), from flat X.
//
// The more of a weight is zero, the more rows can have one order of channels in which hardly any has three non-zeros
// in four neighbours: from about 93% on, all rows. Where fewer are zero, few octets of channels have third ones for a
// tap, and products of these alone follow. X is brought into that order once (flatten.cuh), as octets of channels, with
// its padding; what the first tiles do not read, the kernel brings there itself meanwhile (flat_rest.cuh). Of each
// octet, the pixels of all images are one line, and each tap of the window reads it from another pixel on: the
// convolution is one of a line, whatever the sizes of maps. What a tile reads of an octet is one run of pixels, brought
// by one bulk copy; no thread has anything else to do with it.
//
// Where too few of a weight is zero for such an order, channels keep theirs, and products are dense: of 16 channels, in
// the time of 32, zeros and all.
//
// There is a block for each multiprocessor, which computes tile after tile. Two warpgroups multiply, each 64 output
// channels by up to 256 pixels; a thread of the third one asks for copies. Pixels that are no outputs, beside rows and
// between images, are computed and dropped: outputs of a channel that follow each other in Y leave as they do there.
#pragma once

#include "divide.cuh"
#include "epilogue.cuh"
#include "flat_params.h"
#include "flat_rest.cuh"
#include "intrinsics.cuh"
#include "magnitude.cuh"
#include "recompute.cuh"
#include "warpgroups.cuh"

namespace sparseconv::cuda {

// `T`: the type of Y, bias and residual, Half or float. `kBlocks`: of eight pixels, that a warpgroup computes at a
// time.
template <class T, int kBlocks, FlatProducts kProducts = FlatProducts::kSparse>
class FlatConv {
 public:
  __device__ __forceinline__ FlatConv(const FlatParams& params, const void* shared)
      : p_(params),
        shared_(shared),
        warp_(static_cast<int>(Uniform(threadIdx.x / 32))),
        stages_(SharedAddress(shared)),
        outputs_(stages_ + static_cast<unsigned>(params.num_stages * params.stage_bytes)),
        tables_(outputs_ + kFlatWarps * kWarpRows * kFlatRowBytes),
        barriers_(tables_ + kFlatTables * kFlatTableBytes) {}

  // Returns whether outputs are what they should be; else RecomputeTiles has to follow.
  __device__ __forceinline__ bool Run() {
    LetNextLaunchBegin();
    InitBarriers();
    unsigned seen = 0;
    if (warp_ < kProductWarps) {
      TakeRegisters<kProductRegisters>();
      WaitForLaunchBefore();
      Multiply();
    } else {
      GiveUpRegisters<kStagingRegisters>();
      if (warp_ > kProductWarps) {
        Assist();
      } else if (IsElected()) {
        seen = Stage();
      }
      if constexpr (kIsFloat) {
        WaitForLaunchBefore();
        const int threads = kProductWarps * 32;
        seen |= SeenBefore(p_.recompute, static_cast<int>(threadIdx.x) - threads, kFlatThreads - threads);
      }
    }
    return !kIsFloat || DidHalvesHold(SeenByBlock(seen));
  }

  // Of all the block's tiles, what was computed. To be called by all threads.
  __device__ __forceinline__ void RecomputeTiles() const {
    WaitForBulkStores();
    ForTiles([&](const Tile& tile) {
      const int end = FirstOutput(tile.first + kTilePixels);
      int output = FirstOutput(tile.first);
      while (output < end) output += RecomputeRun(tile, output, end);
    });
  }

 private:
  static constexpr bool kIsFloat = sizeof(T) == sizeof(float), kIsDense = kProducts == FlatProducts::kDense;
  static constexpr int kOctets = kIsDense ? kFlatDenseOctets : kFlatOctets;  // of a chunk
  static constexpr int kProductRegisters = 192, kStagingRegisters = 120;     // of 168 for each thread
  static constexpr int kWarps = kWarpgroupThreads / 32;                      // of a warpgroup
  static constexpr int kProductWarps = kFlatWarpgroups * kWarps;
  static constexpr int kRows = 64, kWarpRows = 16;
  static constexpr int kRunPixels = 8 * kBlocks, kTilePixels = kFlatWarpgroups * kRunPixels;
  static constexpr unsigned kPixelBytes = 16;
  static constexpr unsigned kValueBytes = 2048, kMetaBytes = 256;  // of a step
  static constexpr unsigned kMatrixBytes = 128;
  static constexpr unsigned kStepsAtOnce = 9;
  static constexpr int kElementBytes = sizeof(T);
  // Outputs of a warp's channels are on their way in parts; all floats of a run would take too much room.
  static constexpr int kPartBlocks = 64 / kElementBytes, kParts = (kBlocks + kPartBlocks - 1) / kPartBlocks;
  static_assert(8 * kPartBlocks * kElementBytes + 16 == kFlatRowBytes && kParts <= 2);
  // Of a table's entries: whether there is an output; the others are its bytes in a row.
  static constexpr unsigned kExistsBit = 15, kExists = 1u << kExistsBit;
  static constexpr int kAssistingWarps = kFlatAssistingWarps, kAssistingThreads = 32 * kAssistingWarps;
  static_assert(kProductWarps + 1 + kAssistingWarps == kFlatThreads / 32);

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x % 32); }

  __device__ __forceinline__ Shared StageAddress(int stage) const {
    return stages_ + static_cast<unsigned>(stage * p_.stage_bytes);
  }
  __device__ __forceinline__ unsigned OctetBytes() const {
    return static_cast<unsigned>(p_.stage_pixels) * kPixelBytes;
  }
  __device__ __forceinline__ Shared Table(int slot) const {
    return tables_ + static_cast<unsigned>(slot * kFlatTableBytes);
  }
  __device__ __forceinline__ Shared Filled(int stage) const {
    return barriers_ + static_cast<unsigned>(16 * (kFlatTables + kProductWarps + stage));
  }
  __device__ __forceinline__ Shared Emptied(int stage) const { return Filled(stage) + 8; }
  __device__ __forceinline__ Shared TableFilled(int slot) const { return barriers_ + static_cast<unsigned>(16 * slot); }
  __device__ __forceinline__ Shared TableEmptied(int slot) const { return TableFilled(slot) + 8; }
  // A warp's rows may be written, and have been.
  __device__ __forceinline__ Shared RowsReady(int warp) const {
    return barriers_ + static_cast<unsigned>(16 * (kFlatTables + warp));
  }
  __device__ __forceinline__ Shared RowsKept(int warp) const { return RowsReady(warp) + 8; }
  // Of a warp that assists.
  __device__ __forceinline__ Shared RestSlots(int warp) const {
    return Filled(p_.num_stages) + static_cast<unsigned>(warp * kFlatRestSlots) * FlatRestWarp<T>::SlotBytes(p_.rest);
  }

  __device__ __forceinline__ void InitBarriers() const {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < p_.num_stages; ++stage) {
        InitBarrier(Filled(stage), 1);
        InitBarrier(Emptied(stage), 32 * kProductWarps);
      }
      for (int slot = 0; slot < kFlatTables; ++slot) {
        InitBarrier(TableFilled(slot), kAssistingThreads);
        InitBarrier(TableEmptied(slot), 32 * kProductWarps);
      }
      for (int warp = 0; warp < kProductWarps; ++warp) {
        InitBarrier(RowsReady(warp), 32);
        InitBarrier(RowsKept(warp), 32);
      }
      if (p_.rest.num_units > 0) {
        for (int warp = 0; warp < kAssistingWarps; ++warp) {
          for (unsigned slot = 0; slot < kFlatRestSlots; ++slot) {
            FlatRestWarp<T>::InitSlot(p_.rest, RestSlots(warp), slot);
          }
        }
      }
      FenceBarrierInit();
    }
    __syncthreads();
  }

  struct Tile {
    int row_tile;  // of all groups
    int first;     // pixel
  };

  // Calls function(tile) for the block's tiles.
  template <class Function>
  __device__ __forceinline__ void ForTiles(const Function& function) const {
    for (int index = static_cast<int>(blockIdx.x); index < p_.num_tiles; index += static_cast<int>(gridDim.x)) {
      function(TileAt(index));
    }
  }
  __device__ __forceinline__ Tile TileAt(int index) const {
    const int run = Divide(index, p_.by_row_tiles);
    return {index - run * p_.row_tiles, run * kTilePixels};
  }

  // Where a thread stands: at a chunk, and the stage that holds it; all stages were filled `round` times before.
  struct Position {
    unsigned chunk = 0;
    int stage = 0;
    unsigned round = 0;
  };
  __device__ __forceinline__ void Advance(Position& at) const {
    ++at.chunk;
    if (++at.stage < p_.num_stages) return;
    at.stage = 0;
    ++at.round;
  }

  // --- staging ------------------------------------------------------------------------------------------------------

  // By one thread. Returns what was seen of X that was made flat beside.
  __device__ __forceinline__ unsigned Stage() const {
    const auto* chunks = static_cast<const unsigned char*>(p_.chunks);
    Position at;
    FlatRestReader x_left(p_.rest);
    ForTiles([&](const Tile& tile) {
      const unsigned begin = p_.tile_begins[tile.row_tile], end = p_.tile_begins[tile.row_tile + 1];
      const auto* x = static_cast<const unsigned char*>(p_.x) + static_cast<long long>(tile.first) * kPixelBytes;
      for (at.chunk = begin; at.chunk < end; Advance(at)) {
        const unsigned first = p_.chunk_begins[at.chunk], bytes = 16 * (p_.chunk_begins[at.chunk + 1] - first);
        const unsigned char* from = x + p_.octets[at.chunk] * p_.octet_bytes;
        if (at.round > 0) WaitForBarrier(Emptied(at.stage), (at.round - 1) % 2);
        ExpectBytes(Filled(at.stage), bytes + kOctets * OctetBytes());
        Shared to = StageAddress(at.stage);
        CopyBulkCached(to + kOctets * OctetBytes(), chunks + 16 * static_cast<size_t>(first), bytes, Filled(at.stage));
        WaitForLaunchBefore();  // the weight needs no such wait
        if (at.chunk == begin) x_left.WaitForPixels(tile.first, tile.first + p_.stage_pixels - 1);
#pragma unroll
        for (int octet = 0; octet < kOctets; ++octet, to += OctetBytes(), from += p_.octet_bytes) {
          CopyBulkCached(to, from, OctetBytes(), Filled(at.stage));
        }
        Arrive(Filled(at.stage));
      }
    });
    return x_left.seen();
  }

  // --- products -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void Multiply() {
    const int run = warp_ / kWarps * kRunPixels;
    unsigned metas[kStepsAtOnce] = {};
    Position at;
    Slot slot;
    unsigned before = 0;
    ForTiles([&](const Tile& tile) {
      WaitForBarrier(TableFilled(slot.index), slot.round % 2);
      unsigned begin, end;
      LoadSharedPair(Table(slot.index), begin, end);
      begin = Uniform(begin), end = Uniform(end);
      const Finish<T> lower = FinishOf(tile, 0), upper = FinishOf(tile, 8);
      if (begin == end) ClearSums();
      for (at.chunk = begin; at.chunk < end; Advance(at)) {
        WaitForBarrier(Filled(at.stage), at.round % 2);
        MultiplyChunk(at, at.chunk == begin, static_cast<unsigned>(run) * kPixelBytes, metas);
        if (p_.num_stages == 1 || at.chunk + 1 == end) {
          WaitForProducts<0>();
          Arrive(Emptied(at.stage));
        }
      }
      KeepTile(tile, PlacesOf(slot) + static_cast<unsigned>(2 * run), lower, upper, before++);
      Arrive(TableEmptied(slot.index));
      slot.Advance();
    });
    WaitForBulkReads();  // shared memory goes with the block
  }

  __device__ __forceinline__ void ClearSums() {
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) sums_[i] = 0.0f;
  }

  // Some products are always on their way while what the next ones need is loaded, also from one chunk to the next: the
  // stage before is released when the first of this one are behind it. The metadata of a product must stay in its
  // register until that is complete; see wgmma_conv.cuh.
  __device__ __forceinline__ void MultiplyChunk(const Position& at, bool is_first, unsigned first,
                                                unsigned (&metas)[kStepsAtOnce]) {
    const Shared stage = StageAddress(at.stage), header = stage + kOctets * OctetBytes();
    const Shared values = header + static_cast<unsigned>(p_.header_bytes);
    const unsigned counts = Uniform(LoadShared(header)), steps = counts & 0xFFFFu, pairs = counts >> 16;
    const Shared meta = values + (steps + pairs) * kValueBytes + static_cast<unsigned>(warp_ % kWarps * 64) +
                        static_cast<unsigned>(Lane() / 4 * 8 + Lane() % 2 * 4);
    const Matrix a = MatrixAt(Uniform(values), kMatrixBytes, 2 * kMatrixBytes);
    const Matrix b = MatrixAt(Uniform(stage + first), OctetBytes(), kMatrixBytes);
    for (unsigned begin = 0; begin < steps; begin += kStepsAtOnce) {
#pragma unroll
      for (unsigned part = 0; part < kStepParts; ++part) {
        if (begin + StepPart(part) >= steps) {
          if (part == 1) WaitForProducts<0>();  // none follows the first one, whose registers are the next to be loaded
          break;
        }
        unsigned taps[kStepsAtOnce];
#pragma unroll
        for (unsigned i = StepPart(part); i < StepPart(part + 1); ++i) {
          if (!kIsDense) LoadSharedIf(begin + i < steps, metas[i], meta + (begin + i) * kMetaBytes);
          taps[i] = LoadShared(header + 4 + 4 * min(begin + i, steps - 1));
        }
        FenceSums();
#pragma unroll
        for (unsigned i = StepPart(part); i < StepPart(part + 1); ++i) {
          if (begin + i >= steps) continue;
          const Matrix values_of_step = Moved(a, (begin + i) * kValueBytes);
          const Matrix x = Moved(b, p_.tap_bytes[Uniform(taps[i])]);
          const unsigned keeps_sums = i > 0 || begin > 0 || !is_first;
          if constexpr (kIsDense) {
            MultiplyDenseOctets(sums_, values_of_step, x, keeps_sums);
          } else {
            MultiplySparseOctets(sums_, values_of_step, x, metas[i], keeps_sums);
          }
        }
        CommitProducts();
        WaitForProducts<1>();
        if (part == 0 && begin == 0 && !is_first) ReleaseBefore(at);
      }
    }
    if constexpr (!kIsDense) {
      if (pairs == 0) return;
      // Products of another shape are in no order with these.
      WaitForProducts<0>();
      if (steps == 0) ReleaseBefore(at);  // pairs alone are never a tile's first chunk
      MultiplyPairs(stage + first, header + 4 + 4 * steps, Moved(a, steps * kValueBytes), pairs);
      WaitForProducts<0>();
    }
  }

  // The stage before, where there is another.
  __device__ __forceinline__ void ReleaseBefore(const Position& at) const {
    if (p_.num_stages > 1) Arrive(Emptied((at.stage == 0 ? p_.num_stages : at.stage) - 1));
  }

  // Of two octets each, of a chunk whose first pixel is at `x`: by entries that are the third of their neighbours, or
  // the fourth.
  __device__ __forceinline__ void MultiplyPairs(Shared x, Shared words, Matrix values, unsigned pairs) {
    constexpr unsigned kAtOnce = 4;
    for (unsigned begin = 0; begin < pairs; begin += kAtOnce) {
      unsigned inputs[kAtOnce];
#pragma unroll
      for (unsigned i = 0; i < kAtOnce; ++i) {
        const unsigned word = LoadShared(words + 4 * min(begin + i, pairs - 1));
        const auto at = [&](unsigned of) { return x + (of & 0xFFu) * OctetBytes() + p_.tap_bytes[of >> 8 & 0xFFu]; };
        const Shared first = at(word), second = at(word >> 16);
        inputs[i] = LowerWord(MatrixAt(first, second - first, kMatrixBytes));
      }
      FenceSums();
#pragma unroll
      for (unsigned i = 0; i < kAtOnce; ++i) {
        if (begin + i >= pairs) continue;
        MultiplyDenseOctets(sums_, Moved(values, (begin + i) * kValueBytes), MatrixOf(Uniform(inputs[i]), kMatrixBytes),
                            1);
      }
      CommitProducts();
      WaitForProducts<1>();
    }
  }

  // The first step of a part; there are three. The first part is short, for the stage before waits for it.
  static constexpr unsigned kStepParts = 3;
  static __device__ __forceinline__ constexpr unsigned StepPart(unsigned part) { return part == 0 ? 0 : 4 * part - 3; }

  // --- outputs ------------------------------------------------------------------------------------------------------

  // Of a channel, outputs are counted through all images, `num_outputs` in all.
  struct Place {
    int row, column;  // of an image, of pixels
    int output;       // where the pixel is one
  };

  __device__ __forceinline__ Place PlaceOf(int pixel) const {
    const int image = Divide(pixel, p_.image.by_pixels);
    const int rest = pixel - image * p_.image.rows * p_.image.row_pixels;
    const int row = Divide(rest, p_.image.by_row_pixels), column = rest - row * p_.image.row_pixels;
    return {row, column, (image * p_.out_h + row) * p_.out_w + column};
  }

  // The first one at a pixel or behind it.
  __device__ __forceinline__ int FirstOutput(int pixel) const {
    const Place place = PlaceOf(pixel);
    const int beyond =
        place.row < p_.out_h ? max(place.column - p_.out_w, 0) : (place.row - p_.out_h) * p_.out_w + place.column;
    return min(place.output - beyond, p_.num_outputs);
  }

  // A table, and how often all of them were filled before.
  struct Slot {
    int index = 0;
    unsigned round = 0;

    __device__ __forceinline__ void Advance() {
      if (++index < kFlatTables) return;
      index = 0;
      ++round;
    }
  };

  __device__ __forceinline__ Shared PlacesOf(const Slot& slot) const { return Table(slot.index) + kFlatTableHeader; }

  __device__ __forceinline__ Shared RowsOf(int warp) const {
    return outputs_ + static_cast<unsigned>(warp * kWarpRows * kFlatRowBytes);
  }

  // Part after part. Of halves there is one; `before` tiles were kept before.
  __device__ __forceinline__ void KeepTile(const Tile& tile, Shared table, const Finish<T>& lower,
                                           const Finish<T>& upper, unsigned before) {
    table += static_cast<unsigned>(Lane() % 4 * 4);
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      Outputs outputs;
      if constexpr (kIsFloat) {
        outputs = OutputsOf(tile, warp_, part);
        WaitForBulkReads();
        WaitForWarp();
        if (p_.epilogue.residual != nullptr) {
          MovePart<false>(outputs);
          WaitForWarp();
        }
      } else {
        WaitForBarrier(RowsReady(warp_), before % 2);
      }
      // Sums must be named by constants; and what is done to them would be before products are waited for.
      if (part == 0) KeepPart<0>(table, lower.Unforeseen(), upper.Unforeseen());
      if constexpr (kParts > 1) {
        if (part == 1) KeepPart<kPartBlocks>(table, lower.Unforeseen(), upper.Unforeseen());
      }
      FenceSharedForTensorCores();  // and the copy engine
      if constexpr (kIsFloat) {
        WaitForWarp();
        MovePart<true>(outputs);
        // Behind code in which threads part, the compiler else lets products wait for each other.
        WaitForWarp();
      } else {
        Arrive(RowsKept(warp_));
      }
    }
  }

  // Finishes the outputs of a part: without branches for each, which would have loads wait for stores.
  template <int kBegin>
  __device__ __forceinline__ void KeepPart(Shared table, const Finish<T>& lower, const Finish<T>& upper) {
    constexpr int kEnd = kBegin + kPartBlocks < kBlocks ? kBegin + kPartBlocks : kBlocks;
    const Epilogue& e = p_.epilogue;
    const Shared row = RowsOf(warp_) + static_cast<unsigned>(Lane() / 4 * kFlatRowBytes);
    constexpr unsigned kBehind = 8 * kFlatRowBytes;  // the thread's other channel
#pragma unroll
    for (int i = 4 * kBegin; i < 4 * kEnd; ++i) sums_[i] = (i / 2 % 2 == 0 ? lower : upper)(sums_[i]);
    if (e.residual != nullptr) {
#pragma unroll
      for (int block = kBegin; block < kEnd; ++block) {
        const unsigned places = LoadShared(table + static_cast<unsigned>(16 * block));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned place = places >> 16 * (i % 2);
          if ((place & kExists) != 0) sums_[4 * block + i] += LoadKept(row + place % kExists + i / 2 * kBehind);
        }
      }
    }
    if (!IsBound(e.activation)) {
#pragma unroll
      for (int block = kBegin; block < kEnd; ++block) {
        Floats<4> outputs;
#pragma unroll
        for (int i = 0; i < 4; ++i) outputs.at[i] = sums_[4 * block + i];
        outputs = ActivateElsewhere<Half>(e.activation, outputs, e.alpha, e.beta);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[4 * block + i] = outputs.at[i];
      }
    }
#pragma unroll
    for (int block = kBegin; block < kEnd; ++block) {
      const unsigned places = LoadShared(table + static_cast<unsigned>(16 * block));
#pragma unroll
      for (unsigned i = 0; i < 2; ++i) {
        const Shared at = row + (places >> 16 * i) % kExists;
        const unsigned bit = kExistsBit + 16 * i;
        const float pair[2] = {sums_[4 * block + i], sums_[4 * block + 2 + i]};  // of a pixel, of both channels
        if constexpr (kIsFloat) {
          StoreSharedIf(places, bit, at, Bounded<T>(e.bounds, pair), at + kBehind, Bounded<T>(e.bounds, pair + 1));
        } else {
          const Half2 bounded = Bounded<T>(e.bounds, pair);
          StoreSharedHalvesIf(places, bit, at, Lower(bounded), at + kBehind, Upper(bounded));
        }
      }
    }
  }

  static __device__ __forceinline__ float LoadKept(Shared address) {
    if constexpr (kIsFloat) {
      return BitsToFloat(LoadShared(address));
    } else {
      return ToFloat(LoadSharedHalf(address));
    }
  }

  // --- outputs on their way to Y, and residuals ----------------------------------------------------------------------

  // By the warps that have nothing else to do: where outputs of a tile lie, for the next tile while one is computed;
  // and of halves, a warp moves the outputs of several warps that multiply, so that these go on. Of floats, twice as
  // much, they are too few for it. As long as they would wait, they make X flat.
  __device__ __forceinline__ void Assist() const {
    const int first = warp_ - kProductWarps - 1;
    FlatRestWarp<T> x_left(p_.rest, RestSlots(first));
    Slot slot;  // of the next tile's table
    unsigned before = 0;
    FillTable(static_cast<int>(blockIdx.x), slot);
    WaitForLaunchBefore();
    x_left.Begin();
    for (int index = static_cast<int>(blockIdx.x); index < p_.num_tiles; index += static_cast<int>(gridDim.x)) {
      if (slot.round > 0) MakeFlatUntil(x_left, TableEmptied(slot.index), (slot.round - 1) % 2);
      FillTable(index + static_cast<int>(gridDim.x), slot);
      if constexpr (!kIsFloat) {
        for (int warp = first; warp < kProductWarps; warp += kAssistingWarps) {
          if (p_.epilogue.residual != nullptr) MovePart<false>(OutputsOf(TileAt(index), warp, 0));
          Arrive(RowsReady(warp));
        }
        MakeFlatUntil(x_left, RowsKept(first), before % 2);
        for (int warp = first; warp < kProductWarps; warp += kAssistingWarps) {
          WaitForBarrier(RowsKept(warp), before % 2);
          MovePart<true>(OutputsOf(TileAt(index), warp, 0));
        }
        WaitForBulkReads();
        WaitForWarp();
        ++before;
      }
    }
    while (x_left.HasUnit()) x_left.MakeUnitFlat();
    x_left.Count();
  }

  // Some of X that is left, until a barrier's phase is complete.
  static __device__ __forceinline__ void MakeFlatUntil(FlatRestWarp<T>& x_left, Shared barrier, unsigned parity) {
    while (x_left.HasUnit() && Uniform(IsComplete(barrier, parity)) == 0) x_left.MakeUnitFlat();
    x_left.Count();
  }

  // Which chunks a tile has, and where in a row the outputs of its pixels lie, in bytes. There may be no such tile.
  __device__ __forceinline__ void FillTable(int index, Slot& slot) const {
    constexpr int kPartPixels = 8 * kPartBlocks;
    if (index >= p_.num_tiles) return;
    const Tile tile = TileAt(index);
    if (slot.round > 0) WaitForBarrier(TableEmptied(slot.index), (slot.round - 1) % 2);
    for (int i = static_cast<int>(threadIdx.x) - (kFlatThreads - kAssistingThreads); i < kTilePixels;
         i += kAssistingThreads) {
      const int begin = i / kRunPixels * kRunPixels + i % kRunPixels / kPartPixels * kPartPixels;
      const int base = FirstOutput(tile.first + begin) >> p_.out_shift << p_.out_shift;
      const Place place = PlaceOf(tile.first + i);
      const bool exists = place.column < p_.out_w && place.row < p_.out_h && place.output < p_.num_outputs;
      const unsigned at = exists ? kExists | static_cast<unsigned>(place.output - base) * kElementBytes : 0u;
      StoreSharedHalf(PlacesOf(slot) + static_cast<unsigned>(2 * i), static_cast<Half>(at));
    }
    if (threadIdx.x == kFlatThreads - 1) {
      StoreSharedPair(Table(slot.index), p_.tile_begins[tile.row_tile], p_.tile_begins[tile.row_tile + 1]);
    }
    Arrive(TableFilled(slot.index));
    slot.Advance();
  }

  // Outputs of a warp's channels, which pass through its rows together. A row begins with `base`, so that vectors of Y
  // are vectors of it; whole ones are those from `first` to `last`.
  struct Outputs {
    int begin, end, base, first, last;
    int channel, channels;  // the first one, and how many
    Shared rows;
  };

  __device__ __forceinline__ Outputs OutputsOf(const Tile& tile, int warp, int part) const {
    const int pixel = tile.first + warp / kWarps * kRunPixels + 8 * kPartBlocks * part, shift = p_.out_shift;
    Outputs outputs;
    outputs.begin = FirstOutput(pixel);
    outputs.end = FirstOutput(pixel + 8 * min(kPartBlocks, kBlocks - kPartBlocks * part));
    outputs.base = outputs.begin >> shift << shift;
    outputs.first = min((outputs.begin + (1 << shift) - 1) >> shift << shift, outputs.end);
    outputs.last = max(outputs.end >> shift << shift, outputs.first);
    outputs.channel = FirstChannel(tile, warp);
    outputs.channels = min(GroupEnd(tile) - outputs.channel, kWarpRows);
    outputs.rows = RowsOf(warp);
    return outputs;
  }

  // Outputs to Y, or residuals from where they belong to outputs: whole vectors, and what is left at both ends.
  template <bool kIsOutput>
  __device__ __forceinline__ void MovePart(const Outputs& outputs) const {
    const int columns = 1 << p_.out_shift;
    if (columns * kElementBytes == 16) {
      if constexpr (kIsOutput) {
        if (IsElected()) CopyVectors(outputs);
      } else {
        MoveVectors<kIsOutput, 16 / kElementBytes>(outputs);
      }
    } else if (columns == 4) {
      MoveVectors<kIsOutput, 4>(outputs);
    } else if (columns == 2) {
      MoveVectors<kIsOutput, 2>(outputs);
    } else {
      MoveVectors<kIsOutput, 1>(outputs);
    }
    if (columns > 1) MoveEnds<kIsOutput>(outputs);
  }

  // By one lane: what lies together of each channel, image by image.
  __device__ __forceinline__ void CopyVectors(const Outputs& outputs) const {
    const int plane = p_.out_h * p_.out_w;
    for (int begin = outputs.first; begin < outputs.last;) {
      const int image = Divide(begin, p_.by_plane), end = min(outputs.last, (image + 1) * plane);
      T* to = static_cast<T*>(p_.y) + ElementOf(outputs, image, begin);
      Shared from = outputs.rows + static_cast<unsigned>((begin - outputs.base) * kElementBytes);
      const auto bytes = static_cast<unsigned>((end - begin) * kElementBytes);
#pragma unroll 4
      for (int row = 0; row < outputs.channels; ++row, to += plane, from += kFlatRowBytes) StoreBulk(to, from, bytes);
      begin = end;
    }
    CommitBulkStores();
  }

  // A lane moves a vector of each channel: neighbouring outputs of an image.
  template <bool kIsOutput, int kColumns>
  __device__ __forceinline__ void MoveVectors(const Outputs& outputs) const {
    const int plane = p_.out_h * p_.out_w;
    for (int output = outputs.first + Lane() * kColumns; output < outputs.last; output += 32 * kColumns) {
      T* at = Tensor<kIsOutput>() + ElementOf(outputs, Divide(output, p_.by_plane), output);
      Shared shared = outputs.rows + static_cast<unsigned>((output - outputs.base) * kElementBytes);
#pragma unroll 8
      for (int row = 0; row < kWarpRows; ++row, at += plane, shared += kFlatRowBytes) {
        Columns<kColumns * kElementBytes> columns;
        Move<kIsOutput>(columns, at, row < outputs.channels, shared);
      }
    }
  }

  // Half a warp moves outputs before the first vector, a channel a lane; the other half, those behind the last one.
  template <bool kIsOutput>
  __device__ __forceinline__ void MoveEnds(const Outputs& outputs) const {
    const bool is_behind = Lane() >= kWarpRows;
    const int row = Lane() % kWarpRows, begin = is_behind ? outputs.last : outputs.begin;
    const int end = row < outputs.channels ? (is_behind ? outputs.end : outputs.first) : 0;
    // They are of one image, as a vector is.
    T* at = Tensor<kIsOutput>() + ElementOf(outputs, Divide(begin, p_.by_plane), begin) +
            static_cast<long long>(row) * (p_.out_h * p_.out_w);
    Shared shared = outputs.rows + static_cast<unsigned>(row * kFlatRowBytes + (begin - outputs.base) * kElementBytes);
    for (int output = begin; output < end; ++output, ++at, shared += kElementBytes) {
      Columns<kElementBytes> column;
      Move<kIsOutput>(column, at, true, shared);
    }
  }

  template <bool kIsOutput, int kBytes>
  static __device__ __forceinline__ void Move(Columns<kBytes>& columns, T* at, bool exists, Shared shared) {
    if (kIsOutput) {
      columns.LoadShared(shared);
      if (exists) columns.Store(at);
    } else {
      if (exists) columns.Load(at);
      columns.StoreShared(shared);
    }
  }

  // Of residuals, nothing is stored.
  template <bool kIsOutput>
  __device__ __forceinline__ T* Tensor() const {
    return static_cast<T*>(kIsOutput ? p_.y : const_cast<void*>(p_.epilogue.residual));
  }

  // Index in Y of an output of the first channel; outputs are counted through all images.
  __device__ __forceinline__ long long ElementOf(const Outputs& outputs, int image, int output) const {
    return output + (static_cast<long long>(image) * (p_.out_channels - 1) + outputs.channel) * (p_.out_h * p_.out_w);
  }

  __device__ __forceinline__ void WaitForWarp() const { WaitAtBarrier(1 + warp_, 32); }

  // Of the warp, of all output channels.
  __device__ __forceinline__ int FirstChannel(const Tile& tile, int warp) const {
    const int group = tile.row_tile / p_.row_tiles_per_group;
    return group * p_.group_out_channels + (tile.row_tile - group * p_.row_tiles_per_group) * kRows +
           warp % kWarps * kWarpRows;
  }
  // The first channel behind the tile's group.
  __device__ __forceinline__ int GroupEnd(const Tile& tile) const {
    return (tile.row_tile / p_.row_tiles_per_group + 1) * p_.group_out_channels;
  }

  // Of the thread's channel, `behind` the first one.
  __device__ __forceinline__ Finish<T> FinishOf(const Tile& tile, int behind) const {
    const int channel = FirstChannel(tile, warp_) + Lane() / 4 + behind;
    if (channel >= GroupEnd(tile)) return {1.0f, 0.0f};
    const auto* bias = static_cast<const T*>(p_.epilogue.bias);
    return {kIsFloat ? p_.scales[channel] : 1.0f, bias != nullptr ? LoadElement(bias + channel) : 0.0f};
  }

  // --- what halves could not hold -----------------------------------------------------------------------------------

  // Outputs up to `end` that are of one image, and of one row where that is not whole. Returns how many.
  __device__ __forceinline__ int RecomputeRun(const Tile& tile, int output, int end) const {
    const int plane = p_.out_h * p_.out_w, image = Divide(output, p_.by_plane), place = output - image * plane;
    const int column = place % p_.out_w, left = min(end, (image + 1) * plane) - output;
    const int channel = FirstChannel(tile, 0);
    OutputBox box;
    box.first = place + (static_cast<long long>(image) * p_.out_channels + channel) * plane;
    box.channels = min(kRows, GroupEnd(tile) - channel);
    box.rows = column == 0 ? max(left / p_.out_w, 1) : 1;
    box.columns = min(left, p_.out_w - column);
    box.share = 0;
    box.shares = 1;
    Recompute(p_.recompute, box, const_cast<void*>(shared_));
    return box.rows * box.columns;
  }

  const FlatParams& p_;
  const void* const shared_;
  const int warp_;
  const Shared stages_, outputs_, tables_, barriers_;
  float sums_[4 * kBlocks];
};

}  // namespace sparseconv::cuda
