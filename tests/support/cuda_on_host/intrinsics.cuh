// The functions of kernels/cuda/intrinsics.cuh on a CPU. See cuda_on_host.h.
#pragma once

#include "cuda_on_host.h"
#include "half.h"

#define SPARSECONV_HAS_BULK_COPIES 1

namespace sparseconv::cuda {

using Half = unsigned short;
using Half2 = unsigned;
using Shared = unsigned;

inline float ToFloat(Half value) { return HalfToFloat(value); }
inline Half ToHalf(float value) { return FloatToHalf(value); }
inline Half Lower(Half2 pair) { return static_cast<Half>(pair & 0xFFFFu); }
inline Half Upper(Half2 pair) { return static_cast<Half>(pair >> 16); }

inline unsigned FloatBits(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float BitsToFloat(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float LoadReadOnly(const float* address) { return *address; }
inline Half LoadReadOnly(const Half* address) { return *address; }

inline Shared SharedAddress(const void* pointer) { return cuda_on_host::SharedNumber(pointer); }
inline void StoreShared(Shared address, unsigned value) { cuda_on_host::StoreShared(address, value); }
inline unsigned LoadShared(Shared address) { return cuda_on_host::LoadShared<unsigned>(address); }
inline void StoreSharedHalf(Shared address, Half value) { cuda_on_host::StoreShared(address, value); }

inline void CopyAsync4(Shared to, const void* from) { cuda_on_host::CopyAsync(to, from, 4); }
inline void CopyAsync16(Shared to, const void* from) { cuda_on_host::CopyAsync(to, from, 16); }
inline void CommitCopies() { cuda_on_host::CommitCopies(); }
template <int kPending>
void WaitForCopies() {
  cuda_on_host::WaitForCopies(kPending);
}

inline void InitBarrier(Shared barrier, unsigned arrivals) { cuda_on_host::InitBarrier(barrier, arrivals); }
inline void FenceBarrierInit() { cuda_on_host::FenceBarrierInit(); }
inline void ArriveExpecting(Shared barrier, unsigned bytes) { cuda_on_host::Arrive(barrier, bytes); }
inline void WaitForBarrier(Shared barrier, unsigned parity) { cuda_on_host::WaitForBarrier(barrier, parity); }
inline void CopyBulk(Shared to, const void* from, unsigned bytes, Shared barrier) {
  cuda_on_host::CopyBulk(to, from, bytes, barrier);
}

}  // namespace sparseconv::cuda
