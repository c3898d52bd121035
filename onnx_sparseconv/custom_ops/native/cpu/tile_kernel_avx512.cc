// x86-64 with AVX-512F.

#include <immintrin.h>

#include "../half.h"
#include "tile_kernel.h"

namespace sparseconv::cpu {
namespace {

constexpr int kLanes = 16;

struct Vec {
  __m512 v;
};

inline __mmask16 FirstLanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

inline void KeepInRegister(Vec* a) { asm("" : "+v"(a->v)); }
inline Vec Broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec Load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec LoadN(const float* p, int n) { return {_mm512_maskz_loadu_ps(FirstLanes(n), p)}; }
inline void Store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void StoreN(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, FirstLanes(n), a.v); }
inline Vec LoadHalf(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vec LoadHalfN(const uint16_t* p, int n) {
  alignas(32) uint16_t halves[kLanes] = {};
  std::memcpy(halves, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return LoadHalf(halves);
}
inline void StoreHalf(uint16_t* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void StoreHalfN(uint16_t* p, Vec a, int n) {
  alignas(32) uint16_t halves[kLanes];
  StoreHalf(halves, a);
  std::memcpy(p, halves, static_cast<size_t>(n) * sizeof(uint16_t));
}

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec MultiplyAdd(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec Max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec Min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec SelectLess(Vec a, Vec b, Vec x, Vec y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline Vec Round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec PowerOfTwo(Vec n) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}

inline Vec Even(Vec a, Vec b) {
  const __m512i index = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return {_mm512_permutex2var_ps(a.v, index, b.v)};
}
inline Vec Odd(Vec a, Vec b) {
  const __m512i index = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return {_mm512_permutex2var_ps(a.v, index, b.v)};
}

struct LaneRange {
  LaneRange() = default;
  LaneRange(int first, int last) : mask(static_cast<__mmask16>(((1u << last) - 1) & ~((1u << first) - 1))) {}
  Vec Load(const float* p) const { return {_mm512_maskz_loadu_ps(mask, p)}; }
  __mmask16 mask;
};

struct LaneShift {
  explicit LaneShift(int n)
      : index(_mm512_add_epi32(_mm512_set1_epi32(n),
                               _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))) {}
  Vec operator()(Vec a, Vec b) const { return {_mm512_permutex2var_ps(a.v, index, b.v)}; }
  __m512i index;
};

}  // namespace
}  // namespace sparseconv::cpu

#include "depthwise_kernel_impl.h"
#include "tile_kernel_impl.h"

namespace sparseconv::cpu {

const TileKernels& Avx512Kernels() {
  static constexpr TileKernels kKernels{"avx512", kLanes,     14,         14,           0.6,      RunJob,
                                        CopyRows, CopyFloats, CopyHalves, RunDepthwise, RunVector};
  return kKernels;
}

}  // namespace sparseconv::cpu
