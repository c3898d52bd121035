// The PTX that the kernels use, one instruction a function. The tests run the kernels on a CPU with another file of
// this name and these functions; so nothing else here or in the kernels contains assembler, but for generated code.
//
// `Shared` addresses are those of the shared window, in bytes.
#pragma once

namespace sparseconv::cuda {

using Half = unsigned short;  // the bits of an IEEE binary16
using Half2 = unsigned;       // two of them; the lower one is the left neighbour
using Shared = unsigned;

__device__ __forceinline__ float ToFloat(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
  return result;
}

// Rounds to nearest even.
__device__ __forceinline__ Half ToHalf(float value) {
  Half result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}

// A float as it is, so that code for both types can be written once.
__device__ __forceinline__ float ToFloat(float value) { return value; }

__device__ __forceinline__ Half Lower(Half2 pair) { return static_cast<Half>(pair & 0xFFFFu); }
__device__ __forceinline__ Half Upper(Half2 pair) { return static_cast<Half>(pair >> 16); }

__device__ __forceinline__ Half2 Joined(Half lower, Half upper) {
  return static_cast<Half2>(lower) | static_cast<Half2>(upper) << 16;
}

__device__ __forceinline__ Half2 ToHalves(float lower, float upper) {
#if __CUDA_ARCH__ >= 800
  Half2 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(upper), "f"(lower));
  return result;
#else
  return Joined(ToHalf(lower), ToHalf(upper));
#endif
}

__device__ __forceinline__ Half2 AddHalves(Half2 a, Half2 b) {
  Half2 result;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

#if __CUDA_ARCH__ >= 800
// Of each half the larger magnitude, of a's that are none below zero; NaN if either is.
__device__ __forceinline__ Half2 LargerMagnitudes(Half2 a, Half2 b) {
  Half2 result;
  asm("{\n"
      ".reg .b32 magnitudes;\n"
      "abs.f16x2 magnitudes, %2;\n"
      "max.NaN.f16x2 %0, %1, magnitudes;\n"
      "}"
      : "=r"(result)
      : "r"(a), "r"(b));
  return result;
}
#endif

// The same value in every column of a slot.
__device__ __forceinline__ float Twice(float value) { return value; }
__device__ __forceinline__ Half2 Twice(Half value) { return Joined(value, value); }

// The larger one; NaN if either is.
__device__ __forceinline__ float Larger(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return b < a ? a : b;  // a is no NaN where this is used
#endif
}

#if __CUDA_ARCH__ >= 800
// The smaller one; NaN if either is.
__device__ __forceinline__ float Smaller(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The larger of each half of `pair` and that of `least`; NaN stays NaN.
__device__ __forceinline__ Half2 AtLeast(Half2 least, Half2 pair) {
  Half2 result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(least));
  return result;
}

// The smaller of each half of `pair` and that of `most`; NaN stays NaN.
__device__ __forceinline__ Half2 AtMost(Half2 most, Half2 pair) {
  Half2 result;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(most));
  return result;
}
#endif

// The larger of each half and zero; NaN stays NaN.
__device__ __forceinline__ Half2 AtLeastZero(Half2 pair) {
#if __CUDA_ARCH__ >= 800
  return AtLeast(0u, pair);
#else
  const float lower = ToFloat(Lower(pair)), upper = ToFloat(Upper(pair));
  return Joined(lower < 0.0f ? Half{0} : Lower(pair), upper < 0.0f ? Half{0} : Upper(pair));
#endif
}

__device__ __forceinline__ float BitsToFloat(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned FloatToBits(float value) { return __float_as_uint(value); }

// Fast, and 0 for what is less than the least normal float.
__device__ __forceinline__ float Exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float Reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// Within 0 and 1; 0 for NaN.
__device__ __forceinline__ float Saturated(float x) { return __saturatef(x); }

// The same value, of which the compiler does not know that it is: nothing that is computed of it leaves a loop.
__device__ __forceinline__ float Unforeseen(float value) {
  asm volatile("" : "+f"(value));
  return value;
}
__device__ __forceinline__ unsigned Unforeseen(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Loads what no kernel writes while this one runs. No assembler: that, the compiler may move to before the test that
// guards it.
__device__ __forceinline__ float LoadReadOnly(const float* address) { return __ldg(address); }
__device__ __forceinline__ Half LoadReadOnly(const Half* address) { return __ldg(address); }
__device__ __forceinline__ Half2 LoadReadOnly(const Half2* address) { return __ldg(address); }
__device__ __forceinline__ uint2 LoadReadOnly(const uint2* address) { return __ldg(address); }
__device__ __forceinline__ uint4 LoadReadOnly(const uint4* address) { return __ldg(address); }

// The same, or zero where `exists` is. No branch: many of them are on their way together.
__device__ __forceinline__ float LoadReadOnlyIf(unsigned exists, const float* address) {
  float value;
  asm volatile(
      "{\n"
      ".reg .pred loads;\n"
      "setp.ne.u32 loads, %1, 0;\n"
      "mov.f32 %0, 0f00000000;\n"
      "@loads ld.global.nc.f32 %0, [%2];\n"
      "}"
      : "=&f"(value)
      : "r"(exists), "l"(address));
  return value;
}
__device__ __forceinline__ Half LoadReadOnlyIf(unsigned exists, const Half* address) {
  Half value;
  asm volatile(
      "{\n"
      ".reg .pred loads;\n"
      "setp.ne.u32 loads, %1, 0;\n"
      "mov.u16 %0, 0;\n"
      "@loads ld.global.nc.u16 %0, [%2];\n"
      "}"
      : "=&h"(value)
      : "r"(exists), "l"(address));
  return value;
}
__device__ __forceinline__ Half2 LoadReadOnlyIf(unsigned exists, const Half2* address) {
  Half2 value;
  asm volatile(
      "{\n"
      ".reg .pred loads;\n"
      "setp.ne.u32 loads, %1, 0;\n"
      "mov.u32 %0, 0;\n"
      "@loads ld.global.nc.u32 %0, [%2];\n"
      "}"
      : "=&r"(value)
      : "r"(exists), "l"(address));
  return value;
}
__device__ __forceinline__ uint2 LoadReadOnlyIf(unsigned exists, const uint2* address) {
  uint2 words;
  asm volatile(
      "{\n"
      ".reg .pred loads;\n"
      "setp.ne.u32 loads, %2, 0;\n"
      "mov.u32 %0, 0;\nmov.u32 %1, 0;\n"
      "@loads ld.global.nc.v2.u32 {%0, %1}, [%3];\n"
      "}"
      : "=&r"(words.x), "=&r"(words.y)
      : "r"(exists), "l"(address));
  return words;
}

// Loads by way of the caches what launches before may have written: where this one may have begun before these were
// complete, that is not for LoadReadOnly.
template <class Value>
__device__ __forceinline__ Value LoadWritten(const Value* address) {
#if __CUDA_ARCH__ >= 900
  return __ldca(address);
#else
  return LoadReadOnly(address);
#endif
}

// The same of 16 bytes, or zeros where there are none. No branch: many of them are on their way together.
__device__ __forceinline__ uint4 LoadVectorIf(bool exists, const void* address) {
  uint4 words;
  asm volatile(
      "{\n"
      ".reg .pred loads;\n"
      "setp.ne.u32 loads, %4, 0;\n"
      "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@loads ld.global.ca.v4.u32 {%0, %1, %2, %3}, [%5];\n"
      "}"
      : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
      : "r"(static_cast<unsigned>(exists)), "l"(address)
      : "memory");
  return words;
}

// The same, but where there is nothing to load, the words stay as they are.
__device__ __forceinline__ void ReloadVectorIf(bool exists, const void* address, uint4& words) {
  asm volatile(
      "{\n"
      ".reg .pred loads;\n"
      "setp.ne.u32 loads, %4, 0;\n"
      "@loads ld.global.ca.v4.u32 {%0, %1, %2, %3}, [%5];\n"
      "}"
      : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
      : "r"(static_cast<unsigned>(exists)), "l"(address)
      : "memory");
}

// The same of both halves, which begin at multiples of 8 bytes, so many bytes from each other.
template <int kApart = 8>
__device__ __forceinline__ uint4 LoadHalfVectorsIf(bool first, bool second, const void* address) {
  uint4 words;
  asm volatile(
      "{\n"
      ".reg .pred first, second;\n"
      "setp.ne.u32 first, %4, 0;\nsetp.ne.u32 second, %5, 0;\n"
      "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@first ld.global.ca.v2.u32 {%0, %1}, [%6];\n"
      "@second ld.global.ca.v2.u32 {%2, %3}, [%6 + %7];\n"
      "}"
      : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
      : "r"(static_cast<unsigned>(first)), "r"(static_cast<unsigned>(second)), "l"(address), "n"(kApart)
      : "memory");
  return words;
}

// Brings what is to be loaded to the second-level cache, 128 bytes of it.
__device__ __forceinline__ void PrefetchLine(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Loads and stores of what is not read again soon, or, as sums between passes, not by much: in the second-level cache,
// it is the first to give way. What has to stay there is code; see docs/gpu-kernels.md.
__device__ __forceinline__ float LoadOnce(const float* address) { return __ldcs(address); }
__device__ __forceinline__ Half2 LoadOnce(const Half2* address) { return __ldcs(address); }
__device__ __forceinline__ Half LoadOnce(const Half* address) { return __ldcs(address); }
__device__ __forceinline__ uint2 LoadOnce(const uint2* address) { return __ldcs(address); }
__device__ __forceinline__ uint4 LoadOnce(const uint4* address) { return __ldcs(address); }
__device__ __forceinline__ void StoreOnce(float* address, float value) { __stcs(address, value); }
__device__ __forceinline__ void StoreOnce(Half2* address, Half2 value) { __stcs(address, value); }
__device__ __forceinline__ void StoreOnce(Half* address, Half value) { __stcs(address, value); }
__device__ __forceinline__ void StoreOnce(uint2* address, uint2 value) { __stcs(address, value); }
__device__ __forceinline__ void StoreOnce(uint4* address, uint4 value) { __stcs(address, value); }

// Launches that may begin before the one in front of them is complete, on compute capability 9.0 and later; elsewhere
// both do nothing. A kernel that may must wait in each thread that touches what others write or read, before it does;
// and what it reads then must not come by way of LoadReadOnly. So all is complete that was launched before a launch
// that is: it, too, has waited.
__device__ __forceinline__ void WaitForLaunchBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next launch may begin, if it is one of those, when all blocks have come here.
__device__ __forceinline__ void LetNextLaunchBegin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Ends the thread, in whatever function it is.
__device__ __forceinline__ void ExitThread() { asm volatile("exit;"); }

__device__ __forceinline__ Shared SharedAddress(const void* pointer) {
  return static_cast<Shared>(__cvta_generic_to_shared(pointer));
}

// Loads again each time: no value of an earlier load is kept.
__device__ __forceinline__ unsigned LoadShared(Shared address) {
  unsigned value;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// The value stays as it is where the condition does not hold.
__device__ __forceinline__ void LoadSharedIf(unsigned condition, unsigned& value, Shared address) {
  asm volatile(
      "{\n"
      ".reg .pred loads;\n"
      "setp.ne.u32 loads, %1, 0;\n"
      "@loads ld.shared.u32 %0, [%2];\n"
      "}"
      : "+r"(value)
      : "r"(condition), "r"(address)
      : "memory");
}

__device__ __forceinline__ Half LoadSharedHalf(Shared address) {
  Half value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void StoreShared(Shared address, unsigned value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void StoreSharedPair(Shared address, unsigned a, unsigned b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

// The same of floats: as bits, the compiler would keep them as integers, and then has products of warpgroups wait.
__device__ __forceinline__ void StoreSharedPair(Shared address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void StoreSharedHalf(Shared address, Half value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

__device__ __forceinline__ void StoreSharedVectorIf(unsigned condition, Shared address, const unsigned (&words)[4]) {
  asm volatile(
      "{\n"
      ".reg .pred stores;\n"
      "setp.ne.u32 stores, %0, 0;\n"
      "@stores st.shared.v4.u32 [%1], {%2, %3, %4, %5};\n"
      "}" ::"r"(condition),
      "r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

// Where a bit is set, a constant one.
__device__ __forceinline__ void SubtractIf(unsigned bits, unsigned bit, unsigned& value, unsigned less) {
  asm("{\n"
      ".reg .pred subtracts;\n.reg .b32 masked;\n"
      "and.b32 masked, %1, %2;\n"
      "setp.ne.u32 subtracts, masked, 0;\n"
      "@subtracts sub.u32 %0, %0, %3;\n"
      "}"
      : "+r"(value)
      : "r"(bits), "r"(1u << bit), "r"(less));
}

__device__ __forceinline__ void StoreSharedIf(unsigned bits, unsigned bit, Shared first, unsigned a, Shared second,
                                              unsigned b) {
  asm volatile(
      "{\n"
      ".reg .pred stores;\n.reg .b32 masked;\n"
      "and.b32 masked, %0, %1;\n"
      "setp.ne.u32 stores, masked, 0;\n"
      "@stores st.shared.u32 [%2], %3;\n"
      "@stores st.shared.u32 [%4], %5;\n"
      "}" ::"r"(bits),
      "r"(1u << bit), "r"(first), "r"(a), "r"(second), "r"(b)
      : "memory");
}

// The same of halves.
__device__ __forceinline__ void StoreSharedHalvesIf(unsigned bits, unsigned bit, Shared first, Half a, Shared second,
                                                    Half b) {
  asm volatile(
      "{\n"
      ".reg .pred stores;\n.reg .b32 masked;\n"
      "and.b32 masked, %0, %1;\n"
      "setp.ne.u32 stores, masked, 0;\n"
      "@stores st.shared.u16 [%2], %3;\n"
      "@stores st.shared.u16 [%4], %5;\n"
      "}" ::"r"(bits),
      "r"(1u << bit), "r"(first), "h"(a), "r"(second), "h"(b)
      : "memory");
}

// The same of two pairs, 8 bytes each.
__device__ __forceinline__ void StoreSharedPairsIf(unsigned bits, unsigned bit, Shared first, unsigned a0, unsigned a1,
                                                   Shared second, unsigned b0, unsigned b1) {
  asm volatile(
      "{\n"
      ".reg .pred stores;\n.reg .b32 masked;\n"
      "and.b32 masked, %0, %1;\n"
      "setp.ne.u32 stores, masked, 0;\n"
      "@stores st.shared.v2.u32 [%2], {%3, %4};\n"
      "@stores st.shared.v2.u32 [%5], {%6, %7};\n"
      "}" ::"r"(bits),
      "r"(1u << bit), "r"(first), "r"(a0), "r"(a1), "r"(second), "r"(b0), "r"(b1)
      : "memory");
}

// The address of a kernel's only parameter, which is __grid_constant__: here, and not before, where the compiler would
// keep what it knows.
#define SPARSECONV_FIND_PARAMETER(pointer, kernel, parameter) \
  asm volatile("{\n.reg .b64 at;\nmov.b64 at, " #kernel "_param_0;\ncvta.param.u64 %0, at;\n}" : "=l"(pointer));

// Whether any thread's is not 0; a barrier of the block.
__device__ __forceinline__ bool IsAnyInBlock(unsigned value) { return __syncthreads_or(value != 0) != 0; }

// A barrier of its own number, at which `threads` of the block arrive, whole warps; those that wait, and others.
__device__ __forceinline__ void WaitAtBarrier(int number, unsigned threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void ArriveAtBarrier(int number, unsigned threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void LoadSharedPair(Shared address, unsigned& a, unsigned& b) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
}

__device__ __forceinline__ uint4 LoadSharedVector(Shared address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// Four of the eight bytes of a and b. Selectors: the lower halves of both, the upper ones.
constexpr unsigned kLowerHalves = 0x5410, kUpperHalves = 0x7632;
__device__ __forceinline__ unsigned SelectBytes(unsigned a, unsigned b, unsigned selector) {
  return __byte_perm(a, b, selector);
}

#if __CUDA_ARCH__ >= 800
// Four 8x8 matrices of halves, transposed: lane l gives the address of row l % 8 of matrix l / 8, 16 bytes, and gets
// rows 2 * (l % 4) and the next of column l / 4 of each.
__device__ __forceinline__ void LoadMatrices(Shared row, unsigned (&parts)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3])
               : "r"(row)
               : "memory");
}

// sums [16][8] += a [16][32, two of four non-zero] * b [32][8]. The metadata is that of lanes 0 and 1 of each four
// (kSelector 0) or of lanes 2 and 3.
template <int kSelector>
__device__ __forceinline__ void MultiplySparse(float (&sums)[4], const uint4& a, const unsigned (&b)[4],
                                               unsigned meta) {
  asm volatile(
      "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, "
      "{%0, %1, %2, %3}, %12, %13;"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(meta), "n"(kSelector));
}
#endif

// Copies from global to shared memory; those of 16 bytes and more, of what is not read again soon. `CopyAsync*` are
// complete after WaitForCopies (of the same thread) and then seen by a block that has passed a barrier; before sm_80
// they are complete at once.
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ unsigned long long OncePolicy() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void CopyAsync4(Shared to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Both addresses are multiples of 8.
__device__ __forceinline__ void CopyAsync8(Shared to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// Both addresses are multiples of 16.
__device__ __forceinline__ void CopyAsync16(Shared to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(OncePolicy())
               : "memory");
}

// The same of what is read again soon.
__device__ __forceinline__ void CopyAsync16Cached(Shared to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same for neighbouring threads that copy neighbours to distant places: a whole line of global memory is asked for
// at once, by way of the first-level cache, not each 16 bytes on their own.
__device__ __forceinline__ void CopyAsync16ByLines(Shared to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last `kPending` groups of this thread have arrived.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
#else
__device__ __forceinline__ void CopyAsync4(Shared to, const void* from) {
  unsigned value;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(from));
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void CopyAsync16(Shared to, const void* from) {
  unsigned a, b, c, d;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(from));
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void CommitCopies() {}

template <int kPending>
__device__ __forceinline__ void WaitForCopies() {}
#endif

#if __CUDA_ARCH__ >= 900

// A barrier in shared memory, 8 bytes, at which `arrivals` threads arrive in each phase, and that counts copied bytes.
__device__ __forceinline__ void InitBarrier(Shared barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void Arrive(Shared barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when all CopyAsync* that this thread has begun are complete.
__device__ __forceinline__ void ArriveAfterCopies(Shared barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Has the phase wait for `bytes` more.
__device__ __forceinline__ void ExpectBytes(Shared barrier, unsigned bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether this thread is the one that a whole warp chooses; always the same one.
__device__ __forceinline__ bool IsElected() {
  unsigned elected;
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "elect.sync _|chosen, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, chosen;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void WaitForBarrier(Shared barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether the phase of a barrier is complete: 1, or 0.
__device__ __forceinline__ unsigned IsComplete(Shared barrier, unsigned parity) {
  unsigned complete;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete;
}

// Copies `bytes` (a multiple of 16, both addresses too) and counts them at the barrier.
__device__ __forceinline__ void CopyBulk(Shared to, const void* from, unsigned bytes, Shared barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(OncePolicy())
      : "memory");
}
// The same of what is read again soon.
__device__ __forceinline__ void CopyBulkCached(Shared to, const void* from, unsigned bytes, Shared barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// --- what blocks tell each other by memory -------------------------------------------------------------------------

// Returns what was there before.
__device__ __forceinline__ unsigned AddAtomic(unsigned* to, unsigned value) {
  unsigned before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}
__device__ __forceinline__ void OrAtomic(unsigned* to, unsigned bits) {
  asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

// Adds, and waits for a count: what the threads of a warp that adds wrote before, who waits reads behind that. Where it
// is the copy engine that reads, both need FenceMemoryForCopyEngine between.
__device__ __forceinline__ void AddReleased(unsigned* to, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void WaitForCount(const unsigned* from, unsigned count) {
  for (unsigned found = 0;;) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(from) : "memory");
    if (found >= count) return;
    __nanosleep(50);
  }
}
__device__ __forceinline__ void FenceMemoryForCopyEngine() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- blocks of a cluster, which run at the same time ---------------------------------------------------------------

// All lanes' bits joined.
__device__ __forceinline__ unsigned OrInWarp(unsigned bits) { return __reduce_or_sync(0xFFFFFFFFu, bits); }

// Of the block in its cluster.
__device__ __forceinline__ unsigned ClusterRank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of all blocks, each of which arrives, and then waits. What they wrote to shared memory
// before they arrived is seen by those that have waited.
__device__ __forceinline__ void ArriveAtCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// For those that have read what they wanted, and have nothing to show.
__device__ __forceinline__ void ArriveAtClusterToLeave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void WaitForCluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where an address of this block's shared memory lies in that of a block of the cluster, among all of them. What lies
// behind it there, lies behind this.
__device__ __forceinline__ Shared ClusterAddress(Shared address, unsigned rank) {
  Shared there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// A word from such an address or two, or zeros. No branch: many of them are on their way together.
template <int kWords>
__device__ __forceinline__ uint2 LoadClusterPairIf(bool exists, Shared address) {
  static_assert(kWords == 1 || kWords == 2);
  uint2 pair = {0, 0};
  if constexpr (kWords == 1) {
    asm volatile(
        "{\n"
        ".reg .pred loads;\n"
        "setp.ne.u32 loads, %2, 0;\n"
        "@loads ld.shared::cluster.u32 %0, [%1];\n"
        "}"
        : "+r"(pair.x)
        : "r"(address), "r"(static_cast<unsigned>(exists))
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred loads;\n"
        "setp.ne.u32 loads, %3, 0;\n"
        "@loads ld.shared::cluster.v2.u32 {%0, %1}, [%2];\n"
        "}"
        : "+r"(pair.x), "+r"(pair.y)
        : "r"(address), "r"(static_cast<unsigned>(exists))
        : "memory");
  }
  return pair;
}

// Brings what is to be loaded to the second-level cache, `bytes` of it, a multiple of 16, from such a multiple on.
__device__ __forceinline__ void PrefetchBulk(const void* address, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

// Copies `bytes`, a multiple of 16, from shared to global memory, at such multiples both, of what is not read again
// soon. What threads wrote there must have been fenced (FenceSharedForTensorCores) and waited for.
__device__ __forceinline__ void StoreBulk(void* to, Shared from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to), "r"(from),
               "r"(bytes), "l"(OncePolicy())
               : "memory");
}

__device__ __forceinline__ void CommitBulkStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until shared memory may be written again that this thread's StoreBulk read, but those of the last `kPending`
// commits.
template <int kPending = 0>
__device__ __forceinline__ void WaitForBulkReads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// .. until what was stored is in global memory.
__device__ __forceinline__ void WaitForBulkStores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Copies a box of a tensor (a TensorMap) of three axes, of which the innermost comes first, from where it begins. What
// lies outside of the tensor comes as zeros. The box begins at a multiple of 16 bytes. The barrier waits for all of its
// bytes.
__device__ __forceinline__ void CopyBox(Shared to, const void* map, int x, int y, int z, Shared barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// Likewise, from shared to global memory, as StoreBulk. What lies outside of the tensor is not stored.
__device__ __forceinline__ void StoreBox(const void* map, Shared from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(x),
               "r"(y), "r"(z), "r"(from)
               : "memory");
}
#else
// Plans for older architectures have no use for these, and the code that has is never made.
__device__ void InitBarrier(Shared barrier, unsigned arrivals);
__device__ void FenceBarrierInit();
__device__ void Arrive(Shared barrier);
__device__ void ExpectBytes(Shared barrier, unsigned bytes);
__device__ bool IsElected();
__device__ void WaitForBarrier(Shared barrier, unsigned parity);
__device__ void CopyBulk(Shared to, const void* from, unsigned bytes, Shared barrier);
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Four 8x8 matrices of halves, transposed: lane l gives columns 2 * (l % 4) and the next of row l / 4 of each, and the
// address at which column l % 8 of matrix l / 8 goes, 16 bytes.
__device__ __forceinline__ void StoreMatrices(Shared column, const unsigned (&parts)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column), "r"(parts[0]),
               "r"(parts[1]), "r"(parts[2]), "r"(parts[3])
               : "memory");
}

// --- products of warpgroups: each of 128 threads, which call these together ---------------------------------------

// Registers of each thread of a warpgroup from now on: fewer than the kernel was launched with, or more, when others
// have given up as many.
template <int kCount>
__device__ __forceinline__ void GiveUpRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Has the tensor cores, and the copy engine, see what this thread, or copies that it has waited for, wrote to shared
// memory.
__device__ __forceinline__ void FenceSharedForTensorCores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Before the first product of sums that were written since the last one.
__device__ __forceinline__ void FenceSums() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
__device__ __forceinline__ void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the last `kPending` groups are complete.
template <int kPending>
__device__ __forceinline__ void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Where an operand lies in shared memory: matrices of 8 x 16 bytes, 128 contiguous bytes each, so many bytes from one
// to the next along the summed axis and along the other.
struct Matrix {
  unsigned lower, upper;
};
__device__ __forceinline__ Matrix MatrixAt(Shared first, unsigned summed_step, unsigned other_step) {
  return {(first >> 4 & 0x3FFFu) | summed_step >> 4 << 16, other_step >> 4};
}
// The same by its first word, which has all but `other_step`.
__device__ __forceinline__ Matrix MatrixOf(unsigned lower, unsigned other_step) { return {lower, other_step >> 4}; }
__device__ __forceinline__ unsigned LowerWord(const Matrix& matrix) { return matrix.lower; }
// An operand of 128 neighbouring bytes of each row of the summed axis, as boxes bring it: of eight rows, the 16 bytes
// at i of row r lie at i ^ r. So many bytes from eight rows to the next, and from these columns to the next 64. It
// begins at a multiple of 1024 bytes, or some rows of eight behind.
__device__ __forceinline__ Matrix SwizzledMatrixAt(Shared first, unsigned summed_step, unsigned other_step) {
  constexpr unsigned kSwizzled = 1u << 30;
  return {(first >> 4 & 0x3FFFu) | other_step >> 4 << 16, summed_step >> 4 | kSwizzled};
}
// So many bytes on.
__device__ __forceinline__ Matrix Moved(const Matrix& matrix, unsigned bytes) {
  return {matrix.lower + (bytes >> 4), matrix.upper};
}

// sums [64][8 * positions] += a [64][32, two of four non-zero] * b [32][8 * positions]; sums that are not kept begin
// with zero. With 4 * positions sums a thread: of rows r = 16 * (warp % 4) + lane / 4 and r + 8 in turn, two each, of
// columns 2 * (lane % 4) and the next, then those 8 columns on. The metadata is that of lanes 0 and 1 of each four, as
// for mma.sp. Operands 0 to 95 and so on, and eight sums.
#define SPARSECONV_OPERANDS_32                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19" \
  ", %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SPARSECONV_OPERANDS_48 \
  SPARSECONV_OPERANDS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SPARSECONV_OPERANDS_52 SPARSECONV_OPERANDS_48 ", %48, %49, %50, %51"
#define SPARSECONV_OPERANDS_56 SPARSECONV_OPERANDS_52 ", %52, %53, %54, %55"
#define SPARSECONV_OPERANDS_60 SPARSECONV_OPERANDS_56 ", %56, %57, %58, %59"
#define SPARSECONV_OPERANDS_64 SPARSECONV_OPERANDS_60 ", %60, %61, %62, %63"
#define SPARSECONV_OPERANDS_76 SPARSECONV_OPERANDS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75"
#define SPARSECONV_OPERANDS_96                                                       \
  SPARSECONV_OPERANDS_64                                                             \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SPARSECONV_OPERANDS_100 SPARSECONV_OPERANDS_96 ", %96, %97, %98, %99"
#define SPARSECONV_OPERANDS_112                                                              \
  SPARSECONV_OPERANDS_96                                                                     \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
  "%111"
#define SPARSECONV_OPERANDS_116 SPARSECONV_OPERANDS_112 ", %112, %113, %114, %115"
#define SPARSECONV_OPERANDS_120 SPARSECONV_OPERANDS_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define SPARSECONV_OPERANDS_128 SPARSECONV_OPERANDS_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SPARSECONV_SUMS_8(i)                                                                                    \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
      "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define SPARSECONV_SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SPARSECONV_32_SUMS(i) \
  SPARSECONV_SUMS_8(i), SPARSECONV_SUMS_8(i + 8), SPARSECONV_SUMS_8(i + 16), SPARSECONV_SUMS_8(i + 24)
#define SPARSECONV_SUMS_32 SPARSECONV_32_SUMS(0)
#define SPARSECONV_SUMS_48 SPARSECONV_SUMS_32, SPARSECONV_SUMS_8(32), SPARSECONV_SUMS_8(40)
#define SPARSECONV_SUMS_52 SPARSECONV_SUMS_48, SPARSECONV_SUMS_4(48)
#define SPARSECONV_SUMS_56 SPARSECONV_SUMS_48, SPARSECONV_SUMS_8(48)
#define SPARSECONV_SUMS_60 SPARSECONV_SUMS_56, SPARSECONV_SUMS_4(56)
#define SPARSECONV_SUMS_64 SPARSECONV_SUMS_32, SPARSECONV_32_SUMS(32)
#define SPARSECONV_SUMS_76 SPARSECONV_SUMS_64, SPARSECONV_SUMS_8(64), SPARSECONV_SUMS_4(72)
#define SPARSECONV_SUMS_96 SPARSECONV_SUMS_64, SPARSECONV_32_SUMS(64)
#define SPARSECONV_SUMS_100 SPARSECONV_SUMS_96, SPARSECONV_SUMS_4(96)
#define SPARSECONV_SUMS_112 SPARSECONV_SUMS_96, SPARSECONV_SUMS_8(96), SPARSECONV_SUMS_8(104)
#define SPARSECONV_SUMS_116 SPARSECONV_SUMS_112, SPARSECONV_SUMS_4(112)
#define SPARSECONV_SUMS_120 SPARSECONV_SUMS_112, SPARSECONV_SUMS_8(112)
#define SPARSECONV_SUMS_128 SPARSECONV_SUMS_120, SPARSECONV_SUMS_8(120)
// `n` .. `n + 5`, the operands behind the sums: both words of A and B, metadata, whether sums are kept. `other_first`:
// whether 16 bytes of B are eight of the summed axis ("0"), or of the other ("1").
#define SPARSECONV_MULTIPLY(name, other_first, count, columns, n, n1, n2, n3, n4, n5)                                \
  __device__ __forceinline__ void name(float (&sums)[count], const Matrix& a, const Matrix& b, unsigned meta,        \
                                       unsigned keeps_sums) {                                                        \
    asm volatile("{\n.reg .pred keeps;\n.reg .b64 a, b;\nsetp.ne.u32 keeps, %" n5 ", 0;\nmov.b64 a, {%" n ", %" n1   \
                 "};\nmov.b64 b, {%" n2 ", %" n3 "};\nwgmma.mma_async.sp.sync.aligned.m64n" columns                  \
                 "k32.f32.f16.f16 {" SPARSECONV_OPERANDS_##count "}, a, b, %" n4 ", 0, keeps, 1, 1, 0, " other_first \
                                                                 ";\n}"                                              \
                 : SPARSECONV_SUMS_##count                                                                           \
                 : "r"(a.lower), "r"(a.upper), "r"(b.lower), "r"(b.upper), "r"(meta), "r"(keeps_sums));              \
  }
#define SPARSECONV_MULTIPLY_SPARSE(...) SPARSECONV_MULTIPLY(MultiplySparse, "1", __VA_ARGS__)
SPARSECONV_MULTIPLY_SPARSE(32, "64", "32", "33", "34", "35", "36", "37")
SPARSECONV_MULTIPLY_SPARSE(64, "128", "64", "65", "66", "67", "68", "69")
SPARSECONV_MULTIPLY_SPARSE(96, "192", "96", "97", "98", "99", "100", "101")
SPARSECONV_MULTIPLY_SPARSE(112, "224", "112", "113", "114", "115", "116", "117")
SPARSECONV_MULTIPLY_SPARSE(120, "240", "120", "121", "122", "123", "124", "125")
SPARSECONV_MULTIPLY_SPARSE(128, "256", "128", "129", "130", "131", "132", "133")
// The same, but 16 bytes of B are eight of the summed axis: rows of its matrices are columns of the product.
#define SPARSECONV_MULTIPLY_SPARSE_OCTETS(...) SPARSECONV_MULTIPLY(MultiplySparseOctets, "0", __VA_ARGS__)
SPARSECONV_MULTIPLY_SPARSE_OCTETS(32, "64", "32", "33", "34", "35", "36", "37")
SPARSECONV_MULTIPLY_SPARSE_OCTETS(60, "120", "60", "61", "62", "63", "64", "65")
SPARSECONV_MULTIPLY_SPARSE_OCTETS(64, "128", "64", "65", "66", "67", "68", "69")
SPARSECONV_MULTIPLY_SPARSE_OCTETS(76, "152", "76", "77", "78", "79", "80", "81")
SPARSECONV_MULTIPLY_SPARSE_OCTETS(96, "192", "96", "97", "98", "99", "100", "101")
SPARSECONV_MULTIPLY_SPARSE_OCTETS(112, "224", "112", "113", "114", "115", "116", "117")
SPARSECONV_MULTIPLY_SPARSE_OCTETS(116, "232", "116", "117", "118", "119", "120", "121")
SPARSECONV_MULTIPLY_SPARSE_OCTETS(120, "240", "120", "121", "122", "123", "124", "125")
SPARSECONV_MULTIPLY_SPARSE_OCTETS(128, "256", "128", "129", "130", "131", "132", "133")

// sums [64][8 * positions] += a [64][16] * b [16][8 * positions], zeros and all. Else as above.
#define SPARSECONV_MULTIPLY_ALL(name, other_first, count, columns, n, n1, n2, n3, n4)                                 \
  __device__ __forceinline__ void name(float (&sums)[count], const Matrix& a, const Matrix& b, unsigned keeps_sums) { \
    asm volatile("{\n.reg .pred keeps;\n.reg .b64 a, b;\nsetp.ne.u32 keeps, %" n4 ", 0;\nmov.b64 a, {%" n ", %" n1    \
                 "};\nmov.b64 b, {%" n2 ", %" n3 "};\nwgmma.mma_async.sync.aligned.m64n" columns                      \
                 "k16.f32.f16.f16 {" SPARSECONV_OPERANDS_##count "}, a, b, keeps, 1, 1, 0, " other_first ";\n}"       \
                 : SPARSECONV_SUMS_##count                                                                            \
                 : "r"(a.lower), "r"(a.upper), "r"(b.lower), "r"(b.upper), "r"(keeps_sums));                          \
  }
#define SPARSECONV_MULTIPLY_DENSE(...) SPARSECONV_MULTIPLY_ALL(MultiplyDense, "1", __VA_ARGS__)
SPARSECONV_MULTIPLY_DENSE(32, "64", "32", "33", "34", "35", "36")
SPARSECONV_MULTIPLY_DENSE(52, "104", "52", "53", "54", "55", "56")
SPARSECONV_MULTIPLY_DENSE(56, "112", "56", "57", "58", "59", "60")
SPARSECONV_MULTIPLY_DENSE(64, "128", "64", "65", "66", "67", "68")
SPARSECONV_MULTIPLY_DENSE(100, "200", "100", "101", "102", "103", "104")
SPARSECONV_MULTIPLY_DENSE(112, "224", "112", "113", "114", "115", "116")
SPARSECONV_MULTIPLY_DENSE(128, "256", "128", "129", "130", "131", "132")
#define SPARSECONV_MULTIPLY_DENSE_OCTETS(...) SPARSECONV_MULTIPLY_ALL(MultiplyDenseOctets, "0", __VA_ARGS__)
SPARSECONV_MULTIPLY_DENSE_OCTETS(32, "64", "32", "33", "34", "35", "36")
SPARSECONV_MULTIPLY_DENSE_OCTETS(60, "120", "60", "61", "62", "63", "64")
SPARSECONV_MULTIPLY_DENSE_OCTETS(64, "128", "64", "65", "66", "67", "68")
SPARSECONV_MULTIPLY_DENSE_OCTETS(96, "192", "96", "97", "98", "99", "100")
SPARSECONV_MULTIPLY_DENSE_OCTETS(112, "224", "112", "113", "114", "115", "116")
SPARSECONV_MULTIPLY_DENSE_OCTETS(116, "232", "116", "117", "118", "119", "120")
SPARSECONV_MULTIPLY_DENSE_OCTETS(120, "240", "120", "121", "122", "123", "124")
SPARSECONV_MULTIPLY_DENSE_OCTETS(128, "256", "128", "129", "130", "131", "132")
#endif

}  // namespace sparseconv::cuda
