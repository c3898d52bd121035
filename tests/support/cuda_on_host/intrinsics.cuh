// The functions of kernels/cuda/intrinsics.cuh on a CPU. See cuda_on_host.h.
#pragma once

#include "cuda_on_host.h"
#include "half.h"
#include "ptx.h"

namespace sparseconv::cuda {

using Half = unsigned short;
using Half2 = unsigned;
using Shared = unsigned;

inline float ToFloat(Half value) { return HalfToFloat(value); }
inline Half ToHalf(float value) { return FloatToHalf(value); }
inline float ToFloat(float value) { return value; }
inline Half Lower(Half2 pair) { return static_cast<Half>(pair & 0xFFFFu); }
inline Half Upper(Half2 pair) { return static_cast<Half>(pair >> 16); }

inline Half2 Joined(Half lower, Half upper) { return static_cast<Half2>(lower) | static_cast<Half2>(upper) << 16; }
inline float Twice(float value) { return value; }
inline Half2 Twice(Half value) { return Joined(value, value); }
inline Half2 ToHalves(float lower, float upper) { return Joined(ToHalf(lower), ToHalf(upper)); }
inline Half2 AddHalves(Half2 a, Half2 b) {
  return ToHalves(ToFloat(Lower(a)) + ToFloat(Lower(b)), ToFloat(Upper(a)) + ToFloat(Upper(b)));
}
inline Half2 LargerMagnitudes(Half2 a, Half2 b) {
  b &= 0x7FFF7FFFu;
  return Joined(max(Lower(a), Lower(b)), max(Upper(a), Upper(b)));
}
inline float Larger(float a, float b) { return b < a ? a : b; }
inline float Smaller(float a, float b) { return b > a ? a : b; }
inline float Exp2(float x) { return exp2f(x); }
inline float Reciprocal(float x) { return 1.0f / x; }
inline float Saturated(float x) { return x > 0.0f ? Smaller(x, 1.0f) : 0.0f; }
inline Half2 AtLeast(Half2 least, Half2 pair) {
  const auto larger = [](Half value, Half bound) { return ToFloat(value) < ToFloat(bound) ? bound : value; };
  return Joined(larger(Lower(pair), Lower(least)), larger(Upper(pair), Upper(least)));
}

inline Half2 AtMost(Half2 most, Half2 pair) {
  const auto smaller = [](Half value, Half bound) { return ToFloat(value) > ToFloat(bound) ? bound : value; };
  return Joined(smaller(Lower(pair), Lower(most)), smaller(Upper(pair), Upper(most)));
}

inline Half2 AtLeastZero(Half2 pair) { return AtLeast(0u, pair); }

inline float BitsToFloat(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline unsigned FloatToBits(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float Unforeseen(float value) { return value; }
inline unsigned Unforeseen(unsigned value) { return value; }

inline void LetNextLaunchBegin() { cuda_on_host::LetNextLaunchBegin(); }
inline void WaitForLaunchBefore() { cuda_on_host::WaitForLaunchBefore(); }

template <class Value>
Value LoadReadOnly(const Value* address) {
  cuda_on_host::CheckGlobal(address, sizeof(Value));
  cuda_on_host::CheckReadOnly();
  return *address;
}

template <class Value>
Value LoadReadOnlyIf(unsigned exists, const Value* address) {
  return exists != 0 ? LoadReadOnly(address) : Value{};
}

template <class Value>
Value LoadWritten(const Value* address) {
  cuda_on_host::CheckGlobal(address, sizeof(Value));
  cuda_on_host::CheckTouch();
  return *address;
}

inline void PrefetchLine(const void* address) { cuda_on_host::CheckGlobal(address, 1); }
inline void PrefetchBulk(const void* address, unsigned bytes) {
  cuda_on_host::CheckBulk(address, bytes);
  const auto* all = static_cast<const volatile unsigned char*>(address);
  static_cast<void>(all[0]), static_cast<void>(all[bytes - 1]);  // no address far from memory
}
inline void ReloadVectorIf(bool exists, const void* address, uint4& words) {
  if (exists) words = LoadWritten(static_cast<const uint4*>(address));
}
inline uint4 LoadVectorIf(bool exists, const void* address) {
  return exists ? LoadWritten(static_cast<const uint4*>(address)) : uint4{};
}

template <int kApart = 8>
uint4 LoadHalfVectorsIf(bool first, bool second, const void* address) {
  const auto* lower_half = static_cast<const uint2*>(address);
  const auto* upper_half = reinterpret_cast<const uint2*>(static_cast<const unsigned char*>(address) + kApart);
  const uint2 lower = first ? LoadWritten(lower_half) : uint2{}, upper = second ? LoadWritten(upper_half) : uint2{};
  return {lower.x, lower.y, upper.x, upper.y};
}

template <class Value>
Value LoadOnce(const Value* address) {
  cuda_on_host::CheckGlobal(address, sizeof(Value));
  cuda_on_host::CheckTouch();
  return *address;
}
template <class Value>
void StoreOnce(Value* address, Value value) {
  cuda_on_host::CheckGlobal(address, sizeof(Value));
  cuda_on_host::CheckTouch();
  *address = value;
}

inline Shared SharedAddress(const void* pointer) { return cuda_on_host::SharedNumber(pointer); }
inline unsigned LoadShared(Shared address) { return cuda_on_host::LoadShared<unsigned>(address); }
inline void LoadSharedIf(unsigned condition, unsigned& value, Shared address) {
  if (condition == 0) return;
  cuda_on_host::CheckMetadata(&value);
  value = LoadShared(address);
}
inline Half LoadSharedHalf(Shared address) { return cuda_on_host::LoadShared<Half>(address); }
inline void StoreShared(Shared address, unsigned value) { cuda_on_host::StoreShared(address, value); }
inline void StoreSharedPair(Shared address, unsigned a, unsigned b) {
  cuda_on_host::StoreShared(address, static_cast<uint64_t>(b) << 32 | a);
}
inline void StoreSharedPair(Shared address, float a, float b) {
  StoreSharedPair(address, FloatToBits(a), FloatToBits(b));
}
inline void StoreSharedHalf(Shared address, Half value) { cuda_on_host::StoreShared(address, value); }
inline void StoreSharedVectorIf(unsigned condition, Shared address, const unsigned (&words)[4]) {
  if (condition != 0) cuda_on_host::StoreShared(address, uint4{words[0], words[1], words[2], words[3]});
}
inline void SubtractIf(unsigned bits, unsigned bit, unsigned& value, unsigned less) {
  if ((bits >> bit & 1u) != 0) value -= less;
}
inline void StoreSharedIf(unsigned bits, unsigned bit, Shared first, unsigned a, Shared second, unsigned b) {
  if ((bits >> bit & 1u) == 0) return;
  StoreShared(first, a);
  StoreShared(second, b);
}
inline void StoreSharedHalvesIf(unsigned bits, unsigned bit, Shared first, Half a, Shared second, Half b) {
  if ((bits >> bit & 1u) == 0) return;
  StoreSharedHalf(first, a);
  StoreSharedHalf(second, b);
}
inline void StoreSharedPairsIf(unsigned bits, unsigned bit, Shared first, unsigned a0, unsigned a1, Shared second,
                               unsigned b0, unsigned b1) {
  if ((bits >> bit & 1u) == 0) return;
  StoreSharedPair(first, a0, a1);
  StoreSharedPair(second, b0, b1);
}
inline void LoadSharedPair(Shared address, unsigned& a, unsigned& b) {
  const auto pair = cuda_on_host::LoadShared<uint64_t>(address);
  a = static_cast<unsigned>(pair);
  b = static_cast<unsigned>(pair >> 32);
}
inline uint4 LoadSharedVector(Shared address) { return cuda_on_host::LoadShared<uint4>(address); }

constexpr unsigned kLowerHalves = 0x5410, kUpperHalves = 0x7632;
inline unsigned SelectBytes(unsigned a, unsigned b, unsigned selector) {
  return cuda_on_host::prmt_b32(a, b, selector & 0x7777u);
}

inline void StoreMatrices(Shared column, const unsigned (&parts)[4]) { cuda_on_host::StoreMatrices(column, parts); }
inline void LoadMatrices(Shared row, unsigned (&parts)[4]) { cuda_on_host::LoadMatrices(row, parts); }
template <int kSelector>
void MultiplySparse(float (&sums)[4], const uint4& a, const unsigned (&b)[4], unsigned meta) {
  static_assert(kSelector == 0 || kSelector == 1);
  cuda_on_host::MultiplySparse(kSelector, sums, {a.x, a.y, a.z, a.w}, b, meta);
}

template <int kCount>
void GiveUpRegisters() {}
template <int kCount>
void TakeRegisters() {}
inline void FenceSharedForTensorCores() {}
inline void FenceSums() {}
inline void CommitProducts() { cuda_on_host::CommitProducts(); }
// Products are computed at once, but each lane its own part.
template <int kPending>
void WaitForProducts() {
  __syncwarp();
  cuda_on_host::WaitForProducts(kPending);
}
using Matrix = unsigned long long;
inline Matrix MatrixAt(Shared first, unsigned summed_step, unsigned other_step) {
  return static_cast<Matrix>(first >> 4 & 0x3FFFu) | static_cast<Matrix>(summed_step >> 4) << 16 |
         static_cast<Matrix>(other_step >> 4) << 32;
}
inline Matrix MatrixOf(unsigned lower, unsigned other_step) {
  return lower | static_cast<Matrix>(other_step >> 4) << 32;
}
inline Matrix SwizzledMatrixAt(Shared first, unsigned summed_step, unsigned other_step) {
  return MatrixAt(first, other_step, summed_step) | 1ull << 62;
}
inline unsigned LowerWord(Matrix matrix) { return static_cast<unsigned>(matrix); }
inline Matrix Moved(Matrix matrix, unsigned bytes) { return matrix + (bytes >> 4); }
template <size_t kSums>
void MultiplySparse(float (&sums)[kSums], Matrix a, Matrix b, const unsigned& meta, unsigned keeps_sums,
                    bool has_octets = false) {
  cuda_on_host::NoteMetadata(&meta);
  if (keeps_sums == 0) {
    for (float& sum : sums) sum = 0.0f;
  }
  cuda_on_host::MultiplySparseMatrices(sums, kSums / 4, a, b, meta, has_octets);
}
template <size_t kSums>
void MultiplyDense(float (&sums)[kSums], Matrix a, Matrix b, unsigned keeps_sums, bool has_octets = false) {
  if (keeps_sums == 0) {
    for (float& sum : sums) sum = 0.0f;
  }
  cuda_on_host::MultiplyDenseMatrices(sums, kSums / 4, a, b, has_octets);
}
template <size_t kSums>
void MultiplyDenseOctets(float (&sums)[kSums], Matrix a, Matrix b, unsigned keeps_sums) {
  MultiplyDense(sums, a, b, keeps_sums, true);
}
template <size_t kSums>
void MultiplySparseOctets(float (&sums)[kSums], Matrix a, Matrix b, const unsigned& meta, unsigned keeps_sums) {
  MultiplySparse(sums, a, b, meta, keeps_sums, true);
}

inline void WaitAtBarrier(int number, unsigned threads) { cuda_on_host::WaitAtBarrier(number, threads); }
#define SPARSECONV_FIND_PARAMETER(pointer, kernel, parameter) pointer = &parameter;

inline unsigned OrInWarp(unsigned bits) {
  const uint64_t* of_lanes = cuda_on_host::ExchangeInWarp(0xFFFFFFFFu, bits);
  uint64_t all = 0;
  for (int lane = 0; lane < warpSize; ++lane) all |= of_lanes[lane];
  return static_cast<unsigned>(all);
}
inline bool IsAnyInBlock(unsigned value) { return cuda_on_host::IsAnyInBlock(CUDA_ON_HOST_SITE, value != 0); }
inline void ArriveAtBarrier(int number, unsigned threads) { cuda_on_host::ArriveAtBarrier(number, threads); }

inline void CopyAsync4(Shared to, const void* from) { cuda_on_host::CopyAsync(to, from, 4); }
inline void CopyAsync8(Shared to, const void* from) { cuda_on_host::CopyAsync(to, from, 8); }
inline void CopyAsync16(Shared to, const void* from) { cuda_on_host::CopyAsync(to, from, 16); }
inline void CopyAsync16Cached(Shared to, const void* from) { CopyAsync16(to, from); }
inline void CopyAsync16ByLines(Shared to, const void* from) { CopyAsync16(to, from); }
inline void CommitCopies() { cuda_on_host::CommitCopies(); }
template <int kPending>
void WaitForCopies() {
  cuda_on_host::WaitForCopies(kPending);
}

inline unsigned AddAtomic(unsigned* to, unsigned value) {
  const unsigned before = LoadWritten(to);
  *to = before + value;
  return before;
}
inline void OrAtomic(unsigned* to, unsigned bits) { *to = LoadWritten(to) | bits; }
inline void AddReleased(unsigned* to, unsigned value) { AddAtomic(to, value); }
inline void WaitForCount(const unsigned* from, unsigned count) {
  static_cast<void>(LoadWritten(from));
  cuda_on_host::WaitForCount(from, count);
}
inline void FenceMemoryForCopyEngine() {}

inline unsigned ClusterRank() { return cuda_on_host::ClusterRank(); }
inline unsigned ClusterSize() { return cuda_on_host::ClusterSize(); }
inline void ArriveAtCluster() { cuda_on_host::ArriveAtCluster(); }
inline void WaitForCluster() { cuda_on_host::WaitForCluster(); }
inline void ArriveAtClusterToLeave() { ArriveAtCluster(); }
// The block's rank is in bits that no address has.
inline Shared ClusterAddress(Shared address, unsigned rank) { return address | rank << 24; }
template <int kWords>
uint2 LoadClusterPairIf(bool exists, Shared there) {
  if (!exists) return {};
  const Shared address = there & 0xFFFFFFu;
  const unsigned rank = there >> 24;
  if (kWords == 1) return {cuda_on_host::LoadCluster<unsigned>(address, rank), 0};
  return cuda_on_host::LoadCluster<uint2>(address, rank);
}

// Called at the end of what a kernel calls at its end.
inline void ExitThread() {}
inline void InitBarrier(Shared barrier, unsigned arrivals) { cuda_on_host::InitBarrier(barrier, arrivals); }
inline void FenceBarrierInit() { cuda_on_host::FenceBarrierInit(); }
inline void Arrive(Shared barrier) { cuda_on_host::Arrive(barrier); }
inline void ArriveAfterCopies(Shared barrier) { cuda_on_host::ArriveAfterCopies(barrier); }
inline void ExpectBytes(Shared barrier, unsigned bytes) { cuda_on_host::ExpectBytes(barrier, bytes); }
inline bool IsElected() { return threadIdx.x % 32 == 0; }
inline void WaitForBarrier(Shared barrier, unsigned parity) { cuda_on_host::WaitForBarrier(barrier, parity); }
inline unsigned IsComplete(Shared barrier, unsigned parity) { return cuda_on_host::IsComplete(barrier, parity); }
inline void CopyBulk(Shared to, const void* from, unsigned bytes, Shared barrier) {
  cuda_on_host::CopyBulk(to, from, bytes, barrier);
}
inline void StoreBulk(void* to, Shared from, unsigned bytes) { cuda_on_host::StoreBulk(to, from, bytes); }
inline void CopyBox(Shared to, const void* map, int x, int y, int z, Shared barrier) {
  cuda_on_host::CopyBox(to, map, {x, y, z}, barrier);
}
inline void StoreBox(const void* map, Shared from, int x, int y, int z) {
  cuda_on_host::StoreBox(map, from, {x, y, z});
}
inline void CommitBulkStores() { cuda_on_host::CommitBulkStores(); }
inline void WaitForBulkStores() { cuda_on_host::WaitForBulkReads(0); }
template <int kPending = 0>
void WaitForBulkReads() {
  cuda_on_host::WaitForBulkReads(kPending);
}
inline void CopyBulkCached(Shared to, const void* from, unsigned bytes, Shared barrier) {
  CopyBulk(to, from, bytes, barrier);
}

}  // namespace sparseconv::cuda
