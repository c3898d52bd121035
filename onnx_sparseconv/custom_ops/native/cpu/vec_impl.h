// What the loops of the CPU kernels share, over a vector type `Vec`. An instruction set's file defines `Vec` in this
// anonymous namespace, and then includes the loops:
//
//   kLanes; Load, Store, LoadHalf, StoreHalf (whole vectors); LoadN, StoreN, LoadHalfN, StoreHalfN (the first n lanes);
//   Broadcast; operators + - * /; MultiplyAdd(a, b, c) = a * b + c; Less(a, b) ? x : y as SelectLess(a, b, x, y);
//   Max and Min, which return their second operand where either is NaN; Round to nearest; PowerOfTwo(n) = 2^n for an
//   integral n in -127..128, where -127 gives 0 and 128 Inf; LaneShift(n)(a, b) = lanes n, n + 1, ... of a followed by
//   b; Even(a, b) and Odd(a, b) = lanes 0, 2, 4, ... and 1, 3, 5, ... of a followed by b; LaneRange(first,
//   last).Load(p): lanes first..last - 1, zero elsewhere, reading nothing else; KeepInRegister, after which the
//   compiler does not load a vector once more instead of keeping it.
//
// Everything here has internal linkage on purpose: see tile_kernel.h.
#pragma once

namespace sparseconv::cpu {
namespace {

// exp(x) to about 2 ulp: x = n ln 2 + r, a polynomial in r, scaled by 2^n. Goes to 0 and Inf at the ends; keeps NaN.
inline Vec Exp(Vec x) {
  x = Min(Broadcast(89.0f), Max(Broadcast(-88.0f), x));
  const Vec n = Round(x * Broadcast(1.44269504f));
  // ln 2 in two parts, the first with few bits, so that n * ln2_high is exact.
  Vec r = MultiplyAdd(n, Broadcast(-0.693359375f), x);
  r = MultiplyAdd(n, Broadcast(2.12194440e-4f), r);
  Vec p = Broadcast(1.9875691500e-4f);
  p = MultiplyAdd(p, r, Broadcast(1.3981999507e-3f));
  p = MultiplyAdd(p, r, Broadcast(8.3334519073e-3f));
  p = MultiplyAdd(p, r, Broadcast(4.1665795894e-2f));
  p = MultiplyAdd(p, r, Broadcast(1.6666665459e-1f));
  p = MultiplyAdd(p, r, Broadcast(5.0000001201e-1f));
  p = MultiplyAdd(p * r, r, r) + Broadcast(1.0f);
  return p * PowerOfTwo(n);
}

// The codes of `ActivationCode`. `x` stands second in every Max and Min, so that NaN stays NaN.
template <int kCode>
inline Vec Activate(Vec x, const TileOutput& out) {
  const Vec zero = Broadcast(0.0f), one = Broadcast(1.0f);
  if constexpr (kCode == 1) return Max(zero, x);
  if constexpr (kCode == 2) return Min(Broadcast(out.beta), Max(Broadcast(out.alpha), x));
  if constexpr (kCode == 3) return SelectLess(x, zero, Broadcast(out.alpha) * x, x);
  if constexpr (kCode == 4) return x * Max(zero, Min(one, MultiplyAdd(x, Broadcast(1.0f / 6), Broadcast(0.5f))));
  if constexpr (kCode == 5) return Max(zero, Min(one, MultiplyAdd(x, Broadcast(out.alpha), Broadcast(out.beta))));
  if constexpr (kCode == 6) return one / (one + Exp(zero - x));
  if constexpr (kCode == 7) return x / (one + Exp(zero - x));
  return x;
}

template <int kValue>
struct Code {
  static constexpr int value = kValue;
};

// What `function` gives for the code of an activation, which it gets as a `Code`.
template <typename Function>
auto ForActivation(int activation, Function function) {
  switch (activation) {
    case 1:
      return function(Code<1>{});
    case 2:
      return function(Code<2>{});
    case 3:
      return function(Code<3>{});
    case 4:
      return function(Code<4>{});
    case 5:
      return function(Code<5>{});
    case 6:
      return function(Code<6>{});
    case 7:
      return function(Code<7>{});
    default:
      return function(Code<0>{});
  }
}

using ActivateFunction = void (*)(float*, int64_t, const TileOutput&);

template <int kCode>
void ActivateFloats(float* y, int64_t count, const TileOutput& out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(y + i, Activate<kCode>(Load(y + i), out));
  const auto rest = static_cast<int>(count - i);
  if (rest > 0) StoreN(y + i, Activate<kCode>(LoadN(y + i, rest), out), rest);
}

// What is left of an activation once values lie within `low` and `high`: null for Relu, Clip and none.
ActivateFunction ChooseActivate(int activation) {
  return ForActivation(activation, [](auto code) -> ActivateFunction {
    constexpr int kCode = decltype(code)::value;
    if constexpr (kCode <= 2) {
      return nullptr;
    } else {
      return ActivateFloats<kCode>;
    }
  });
}

inline float Bias(const TileOutput& out, int64_t row) {
  if (out.bias == nullptr) return 0.0f;
  return out.is_half ? HalfToFloat(static_cast<const uint16_t*>(out.bias)[row])
                     : static_cast<const float*>(out.bias)[row];
}

// `value` as a number from 0 to `most`.
inline int ClampTo(int most, int64_t value) { return value < 0 ? 0 : value > most ? most : static_cast<int>(value); }

inline int ClampToVector(int64_t lane) { return ClampTo(kLanes, lane); }

}  // namespace
}  // namespace sparseconv::cpu
