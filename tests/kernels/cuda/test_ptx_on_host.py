"""Inline PTX as the generator writes it, translated for the emulation."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.support.cuda_host_build import address, build_host_image, launch
from tests.support.ptx_on_host import translate_inline_ptx

SOURCE = """
#include "intrinsics.cuh"
struct Sums { unsigned part[3]; float whole[2]; };
extern "C" __global__ void kernel(const unsigned* in, unsigned* out) {
  extern __shared__ unsigned shared[];
  for (int i = 0; i < 4; ++i) shared[i] = in[i];
  Sums sums = {{in[4], in[5], in[6]}, {1.5f, -2.0f}};
  const unsigned words[2] = {sparseconv::cuda::SharedAddress(shared), sparseconv::cuda::SharedAddress(shared + 2)};
  asm volatile(R"({
.reg .b32 w<4>;
.reg .b32 v<2>;
.reg .b32 c;
.reg .b16 h0, h1;
.reg .f32 f0, f1;
ld.volatile.shared.b32 w0, [%5+0];
ld.volatile.shared.b32 w1, [%5+4];
ld.volatile.shared.b32 w2, [%6+0];
ld.volatile.shared.b32 w3, [%6+4];
prmt.b32 v0, w0, w1, 0x5432;
mov.b32 c, 0x3C003C00;
fma.rn.f16x2 %0, w2, w3, %0;
mul.rn.f16x2 %1, w2, w3;
add.rn.f16x2 %2, w2, %2;
mov.b32 {h0, h1}, c;
cvt.f32.f16 f0, h0;
cvt.f32.f16 f1, h1;
add.f32 %3, %3, f0;
fma.rn.f32 %4, f1, 0f40400000, %4;
mov.b32 v1, v0;
st_is_not_known
})"
      : "+r"(sums.part[0]), "+r"(sums.part[1]), "+r"(sums.part[2]), "+f"(sums.whole[0]), "+f"(sums.whole[1])
      : "r"(words[0]), "r"(words[1]));
  for (int i = 0; i < 3; ++i) out[i] = sums.part[i];
  out[3] = sums.whole[0] == 2.5f;
  out[4] = sums.whole[1] == 1.0f;
}
"""


def halves(pairs):
    return np.ascontiguousarray(pairs).view(np.float16).astype(np.float64)


def rounded(values):
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def test_half_arithmetic_rounds_once():
    image = build_host_image(SOURCE.replace("st_is_not_known\n", ""))
    rng = np.random.default_rng(0)
    # All exponents; and products near what they are added to, where rounding twice would show.
    bits = rng.integers(0, 1 << 32, (4000, 7), dtype=np.uint32)
    close = rng.uniform(0.25, 4, (4000, 14)).astype(np.float16).view(np.uint32)
    for values in np.concatenate([bits, close]):
        out = np.zeros(5, np.uint32)
        launch(image, "kernel", (1,), (1,), [ctypes.c_void_p(address(a)) for a in (values, out)], shared_bytes=16)
        _, _, a, b, c, _, d = values
        with np.errstate(invalid="ignore"):
            wanted = [
                rounded(halves(a) * halves(b) + halves(c)),
                rounded(halves(a) * halves(b)),
                rounded(halves(a) + halves(d)),
            ]
        np.testing.assert_array_equal(out[:3].view(np.float16), np.concatenate(wanted))
        assert out[3:].tolist() == [1, 1]


def test_bytes_are_permuted():
    image = build_host_image(
        SOURCE.replace("st_is_not_known\n", "").replace("mul.rn.f16x2 %1, w2, w3", "mov.b32 %1, v0")
    )
    values = np.uint32([0x33221100, 0x77665544, 0, 0, 0, 0, 0])
    out = np.zeros(5, np.uint32)
    launch(image, "kernel", (1,), (1,), [ctypes.c_void_p(address(a)) for a in (values, out)], shared_bytes=16)
    assert out[1] == 0x55443322


def test_an_unknown_instruction_is_not_skipped():
    with pytest.raises(AssertionError, match="st_is_not_known"):
        translate_inline_ptx(SOURCE)


def test_other_sources_stay_as_they_are():
    assert translate_inline_ptx("int a; // no assembler") == "int a; // no assembler"
