// The instructions of generated PTX as functions, for ptx_on_host.py. Results have the bits that a GPU gives.
#pragma once

#include "cuda_on_host.h"
#include "half.h"

namespace cuda_on_host {

inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds once: to float by way of "round to odd", which leaves the second rounding, to half, nothing to get wrong.
inline uint16_t RoundToHalf(double exact) {
  float rounded = static_cast<float>(exact);
  if (static_cast<double>(rounded) != exact && __builtin_isfinite(rounded)) {
    uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof(bits));
    if (__builtin_fabs(static_cast<double>(rounded)) > __builtin_fabs(exact)) --bits;  // towards zero
    rounded = FloatOf(bits | 1u);
  }
  return sparseconv::FloatToHalf(rounded);
}

// The product of two halves is exact in double. Their sum with a third need not be, but then it is far from where a
// half is rounded: the smaller summand is less than a 2^30th of the larger one, which is a half itself.
inline uint16_t HalfMultiplyAdd(uint16_t a, uint16_t b, uint16_t c) {
  using sparseconv::HalfToFloat;
  return RoundToHalf(static_cast<double>(HalfToFloat(a)) * HalfToFloat(b) + static_cast<double>(HalfToFloat(c)));
}

template <class Function>
uint32_t ForBothHalves(Function function, uint32_t a, uint32_t b, uint32_t c = 0) {
  const auto low = [](uint32_t pair) { return static_cast<uint16_t>(pair & 0xFFFFu); };
  const auto high = [](uint32_t pair) { return static_cast<uint16_t>(pair >> 16); };
  return function(low(a), low(b), low(c)) | static_cast<uint32_t>(function(high(a), high(b), high(c))) << 16;
}

__attribute__((noinline)) inline uint32_t fma_rn_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  return ForBothHalves(HalfMultiplyAdd, a, b, c);
}
__attribute__((noinline)) inline uint32_t mul_rn_f16x2(uint32_t a, uint32_t b) {
  return ForBothHalves([](uint16_t x, uint16_t y, uint16_t) { return HalfMultiplyAdd(x, y, 0x8000); }, a, b);
}
__attribute__((noinline)) inline uint32_t add_rn_f16x2(uint32_t a, uint32_t b) {
  return ForBothHalves([](uint16_t x, uint16_t y, uint16_t) { return HalfMultiplyAdd(x, 0x3C00, y); }, a, b);
}
inline float fma_rn_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float mul_rn_f32(float a, float b) { return a * b; }
inline float add_f32(float a, float b) { return a + b; }
inline float add_rn_f32(float a, float b) { return a + b; }
inline float cvt_f32_f16(uint16_t value) { return sparseconv::HalfToFloat(value); }

// Four bytes of the eight of b and a, chosen by the selector's four digits.
__attribute__((noinline)) inline uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> (4 * i) & 0xFu;
    if (digit > 7) Fail("prmt that replicates signs");
    result |= static_cast<uint32_t>(bytes >> (8 * digit) & 0xFFu) << (8 * i);
  }
  return result;
}

}  // namespace cuda_on_host
