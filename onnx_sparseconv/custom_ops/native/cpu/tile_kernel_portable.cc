// Any machine: the vectors of GCC and Clang, of four lanes, which every target's vector unit has (SSE2, NEON).

#include "../half.h"
#include "tile_kernel.h"

namespace sparseconv::cpu {
namespace {

constexpr int kLanes = 4;

using Lanes __attribute__((vector_size(kLanes * sizeof(float)))) = float;

struct Vec {
  Lanes lane;
};

template <typename Function>
inline Vec Each(Function function) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v.lane[i] = function(i);
  return v;
}

inline void KeepInRegister(Vec*) {}
inline Vec Broadcast(float x) { return {Lanes{x, x, x, x}}; }
inline Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline Vec LoadN(const float* p, int n) {
  return Each([=](int i) { return i < n ? p[i] : 0.0f; });
}
inline void StoreN(float* p, Vec v, int n) {
  for (int i = 0; i < n; ++i) p[i] = v.lane[i];
}
inline void Store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
inline Vec LoadHalf(const uint16_t* p) {
  return Each([=](int i) { return HalfToFloat(p[i]); });
}
inline Vec LoadHalfN(const uint16_t* p, int n) {
  return Each([=](int i) { return i < n ? HalfToFloat(p[i]) : 0.0f; });
}
inline void StoreHalfN(uint16_t* p, Vec v, int n) {
  for (int i = 0; i < n; ++i) p[i] = FloatToHalf(v.lane[i]);
}
inline void StoreHalf(uint16_t* p, Vec v) { StoreHalfN(p, v, kLanes); }

inline Vec operator+(Vec a, Vec b) { return {a.lane + b.lane}; }
inline Vec operator-(Vec a, Vec b) { return {a.lane - b.lane}; }
inline Vec operator*(Vec a, Vec b) { return {a.lane * b.lane}; }
inline Vec operator/(Vec a, Vec b) { return {a.lane / b.lane}; }
inline Vec MultiplyAdd(Vec a, Vec b, Vec c) { return {a.lane * b.lane + c.lane}; }
inline Vec Max(Vec a, Vec b) {
  return Each([=](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec Min(Vec a, Vec b) {
  return Each([=](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec SelectLess(Vec a, Vec b, Vec x, Vec y) {
  return Each([=](int i) { return a.lane[i] < b.lane[i] ? x.lane[i] : y.lane[i]; });
}
inline Vec Round(Vec a) {
  // Adding 1.5 * 2^23 leaves no bits for a fraction; for the small numbers of Exp that rounds to nearest.
  const float magic = 12582912.0f;
  return Each([=](int i) { return (a.lane[i] + magic) - magic; });
}
inline Vec PowerOfTwo(Vec n) {
  return Each([=](int i) {
    // A NaN must not be converted to an integer; whatever it is scaled by, it stays NaN.
    const int32_t exponent = n.lane[i] == n.lane[i] ? static_cast<int32_t>(n.lane[i]) : 0;
    const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  });
}

inline Vec Even(Vec a, Vec b) {
  return Each([=](int i) { return 2 * i < kLanes ? a.lane[2 * i] : b.lane[2 * i - kLanes]; });
}
inline Vec Odd(Vec a, Vec b) {
  return Each([=](int i) { return 2 * i + 1 < kLanes ? a.lane[2 * i + 1] : b.lane[2 * i + 1 - kLanes]; });
}

struct LaneRange {
  LaneRange() = default;
  LaneRange(int first, int last) : first(first), last(last) {}
  Vec Load(const float* p) const {
    return Each([this, p](int i) { return i >= first && i < last ? p[i] : 0.0f; });
  }
  int first, last;
};

struct LaneShift {
  explicit LaneShift(int n) : n(n) {}
  Vec operator()(Vec a, Vec b) const {
    return Each([=](int i) { return i + n < kLanes ? a.lane[i + n] : b.lane[i + n - kLanes]; });
  }
  int n;
};

}  // namespace
}  // namespace sparseconv::cpu

#include "depthwise_kernel_impl.h"
#include "tile_kernel_impl.h"

namespace sparseconv::cpu {

const TileKernels& PortableKernels() {
  static constexpr TileKernels kKernels{"portable", kLanes,       8,        4, 1.0, RunJob, CopyRows, CopyFloats,
                                        CopyHalves, RunDepthwise, RunVector};
  return kKernels;
}

}  // namespace sparseconv::cpu
