// IEEE binary16 as bits. Conversions for code that has no instruction for them; exact, and rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace sparseconv {

static inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  float value;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {  // Inf and NaN keep their payload; a signalling NaN becomes quiet, as in hardware
    bits = 0x7f800000u | (magnitude & 0x3ffu) << 13 | (magnitude > 0x7c00u ? 0x400000u : 0u);
  } else if (magnitude >= 0x400u) {
    bits = (magnitude << 13) + 0x38000000u;
  } else {  // zero and subnormals: magnitude * 2^-24, exact in float
    value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, sizeof(bits));
  }
  bits |= sign;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

static inline uint16_t FloatToHalf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65520 or more: Inf
  if (bits < 0x38800000u) {
    // A subnormal half is a multiple of 2^-24. Adding 0.5 puts that unit at the float's last bit, so the addition
    // rounds.
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof(magnitude));
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, sizeof(bits));
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  const uint32_t odd = (bits >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xfffu + odd) >> 13));
}

// Whether a half can hold the value as it is. NaN counts, whatever its bits.
static inline bool IsHalf(float value) { return value != value || HalfToFloat(FloatToHalf(value)) == value; }

}  // namespace sparseconv
