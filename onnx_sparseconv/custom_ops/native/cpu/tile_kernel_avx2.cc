// x86-64 with AVX2, FMA and F16C.

#include <immintrin.h>

#include "../half.h"
#include "tile_kernel.h"

namespace sparseconv::cpu {
namespace {

constexpr int kLanes = 8;

struct Vec {
  __m256 v;
};

inline __m256i FirstLanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline void KeepInRegister(Vec* a) { asm("" : "+x"(a->v)); }
inline Vec Broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Vec Load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec LoadN(const float* p, int n) { return {_mm256_maskload_ps(p, FirstLanes(n))}; }
inline void Store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void StoreN(float* p, Vec a, int n) { _mm256_maskstore_ps(p, FirstLanes(n), a.v); }
inline Vec LoadHalf(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Vec LoadHalfN(const uint16_t* p, int n) {
  alignas(16) uint16_t halves[kLanes] = {};
  std::memcpy(halves, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return LoadHalf(halves);
}
inline void StoreHalf(uint16_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void StoreHalfN(uint16_t* p, Vec a, int n) {
  alignas(16) uint16_t halves[kLanes];
  StoreHalf(halves, a);
  std::memcpy(p, halves, static_cast<size_t>(n) * sizeof(uint16_t));
}

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec MultiplyAdd(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec Max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec Min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec SelectLess(Vec a, Vec b, Vec x, Vec y) {
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline Vec Round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec PowerOfTwo(Vec n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
}

inline Vec Even(Vec a, Vec b) {
  const __m256d mixed = _mm256_castps_pd(_mm256_shuffle_ps(a.v, b.v, _MM_SHUFFLE(2, 0, 2, 0)));
  return {_mm256_castpd_ps(_mm256_permute4x64_pd(mixed, _MM_SHUFFLE(3, 1, 2, 0)))};
}
inline Vec Odd(Vec a, Vec b) {
  const __m256d mixed = _mm256_castps_pd(_mm256_shuffle_ps(a.v, b.v, _MM_SHUFFLE(3, 1, 3, 1)));
  return {_mm256_castpd_ps(_mm256_permute4x64_pd(mixed, _MM_SHUFFLE(3, 1, 2, 0)))};
}

struct LaneRange {
  LaneRange() = default;
  LaneRange(int first, int last) : mask(_mm256_andnot_si256(FirstLanes(first), FirstLanes(last))) {}
  Vec Load(const float* p) const { return {_mm256_maskload_ps(p, mask)}; }
  __m256i mask;
};

struct LaneShift {
  explicit LaneShift(int n)
      : index(_mm256_add_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))),
        from_second(_mm256_castsi256_ps(_mm256_cmpgt_epi32(index, _mm256_set1_epi32(kLanes - 1)))) {}
  Vec operator()(Vec a, Vec b) const {  // the permutation reads the lowest three bits of each index
    return {_mm256_blendv_ps(_mm256_permutevar8x32_ps(a.v, index), _mm256_permutevar8x32_ps(b.v, index), from_second)};
  }
  __m256i index;
  __m256 from_second;
};

}  // namespace
}  // namespace sparseconv::cpu

#include "depthwise_kernel_impl.h"
#include "tile_kernel_impl.h"

namespace sparseconv::cpu {

const TileKernels& Avx2Kernels() {
  static constexpr TileKernels kKernels{"avx2",     kLanes,       8,        6, 1.0, RunJob, CopyRows, CopyFloats,
                                        CopyHalves, RunDepthwise, RunVector};
  return kKernels;
}

}  // namespace sparseconv::cpu
