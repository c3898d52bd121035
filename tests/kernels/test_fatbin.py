"""nvFatbin: what it makes of real cubins, what it refuses, and how it is found."""

from __future__ import annotations

import pickle
import struct

import pytest

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels import fatbin, nvrtc
from onnx_sparseconv.kernels.nvrtc import Program
from onnx_sparseconv.kernels.targets import known_architectures
from tests.support.gpu_images import FAT_BINARY, cubin_bytes, needs_nvfatbin

# Begins every frame of Zstandard: what `fatbin.MIN_DRIVER` is the first driver for.
ZSTANDARD = b"\x28\xb5\x2f\xfd"
HEADER_BYTES = 16  # of a fat binary; its one entry has a header too
PAIRS = [
    pytest.param(compiler, fatbin.find(compiler.version[0]), id=f"NVRTC {compiler.version[0]}")
    for compiler in nvrtc.installed()
    if fatbin.find(compiler.version[0])
]


def make_cubin(compiler, architecture, terms=300):
    """Straight-line code, as generated kernels have it."""
    lines = "".join(f"s = x[{i}] * {i}.5f + s * {i / 7}f;\n" for i in range(terms))
    source = f'extern "C" __global__ void f(const float* x, float* y) {{ float s = 0;\n{lines}*y = s; }}'
    return compiler.compile(Program(source, options=(f"--gpu-architecture=sm_{architecture}",))).cubin


@pytest.mark.parametrize(("compiler", "packer"), PAIRS)
def test_a_cubin_of_any_architecture_becomes_smaller(compiler, packer):
    for architecture in known_architectures(compiler):
        cubin = make_cubin(compiler, architecture)
        packed = packer.compress(cubin, architecture)
        assert packed.startswith(FAT_BINARY)
        assert cubin_bytes(packed) == len(cubin)
        assert len(packed) < 0.6 * len(cubin)
        (entry_header_bytes,) = struct.unpack_from("<I", packed, HEADER_BYTES + 4)
        assert packed[HEADER_BYTES + entry_header_bytes :].startswith(ZSTANDARD)
        # What it says of its own size is true, and so is the architecture that it names.
        assert struct.unpack_from("<Q", packed, 8) == (len(packed) - HEADER_BYTES,)
        assert struct.unpack_from("<I", packed, 44) == (architecture,)
        assert packed == packer.compress(cubin, architecture)


@pytest.mark.parametrize(("compiler", "packer"), PAIRS)
def test_what_is_no_cubin_for_the_architecture_is_refused(compiler, packer):
    cubin = make_cubin(compiler, 80, terms=1)
    for code, architecture in ((cubin, 90), (cubin, 999), (b"", 80), (b"not a cubin", 80)):
        with pytest.raises(CompileError, match=rf"nvFatbinAddCubin for sm_{architecture} of .* failed: \w+"):
            packer.compress(code, architecture)
    assert packer.compress(cubin, 80)


@pytest.mark.parametrize(("compiler", "packer"), PAIRS)
def test_another_process_loads_the_same_file(compiler, packer):
    copy = pickle.loads(pickle.dumps(packer))
    assert (copy.path, copy.version, copy.name) == (
        packer.path,
        packer.version,
        f"nvFatbin {copy.version[0]}.{copy.version[1]}",
    )
    cubin = make_cubin(compiler, 80)
    assert copy.compress(cubin, 80) == packer.compress(cubin, 80)


@needs_nvfatbin
def test_an_unknown_option_is_an_error(monkeypatch):
    packer = next(p for p in map(fatbin.find, fatbin.WHEELS) if p)
    monkeypatch.setattr(fatbin, "OPTIONS", ("-compress-mode=smallest-ever",))
    with pytest.raises(CompileError, match=r"nvFatbinCreate of .* failed: "):
        packer.compress(b"\x7fELF", 80)


@needs_nvfatbin
def test_one_that_is_too_old_is_none(monkeypatch):
    major = next(m for m in fatbin.WHEELS if fatbin.find(m))
    assert fatbin.find(major).version[0] == major
    monkeypatch.setattr(fatbin, "OLDEST_VERSION", (99, 1))
    assert fatbin.find(major) is None
    assert fatbin.how_to_install(major) == f"pip install '{fatbin.WHEELS[major]}>=99.1'"


def test_where_there_is_none(monkeypatch):
    monkeypatch.setattr(fatbin, "WHEELS", {12: "no-such-wheel"})
    monkeypatch.setattr(fatbin, "_LOADER_NAME", "libno-such-nvfatbin.so.{}")
    assert fatbin.find(12) is None
    assert fatbin.find(11) is None
