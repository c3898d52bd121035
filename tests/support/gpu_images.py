"""GPU images that no GPU would run, for tests of everything around them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import onnx_sparseconv
from onnx_sparseconv.kernels import fatbin, nvjitlink, nvrtc
from onnx_sparseconv.kernels.image_container import PLAN_FIELDS, Image
from onnx_sparseconv.kernels.plan import GeneratedPlan

CUDA_SOURCES = Path(onnx_sparseconv.__file__).parent / "kernels" / "cuda"


def make_plan(seed=0):
    """A plan whose fields all differ."""
    numbers = iter(range(seed + 1, seed + 1000))
    values = {}
    for name, code in PLAN_FIELDS:
        pair = tuple(next(numbers) for _ in code)
        values[name] = pair if len(code) > 1 else pair[0]
    return GeneratedPlan(**values)


def make_image(architecture, code=b"not a cubin"):
    return Image(architecture, 12000, "NVRTC 12.9", make_plan(architecture), code)


ELF = b"\x7fELF"
FAT_BINARY = struct.pack("<I", 0xBA55ED50)
# In a fat binary of one entry: the bytes of the code that it holds compressed.
_UNPACKED_BYTES_AT = 72


def cubin_bytes(code):
    """Bytes of the cubin that an image is, or that it holds compressed."""
    if code.startswith(FAT_BINARY):
        (unpacked,) = struct.unpack_from("<Q", code, _UNPACKED_BYTES_AT)
        return unpacked
    assert code.startswith(ELF)
    return len(code)


needs_nvrtc = pytest.mark.skipif(not nvrtc.installed(), reason="NVRTC is not installed")
needs_nvfatbin = pytest.mark.skipif(
    not any(fatbin.find(n.version[0]) for n in nvrtc.installed()), reason="nvFatbin is not installed, or not for NVRTC"
)
needs_nvjitlink = pytest.mark.skipif(
    not any(nvjitlink.find(n.version) for n in nvrtc.installed()), reason="nvJitLink is not installed, or not for NVRTC"
)
