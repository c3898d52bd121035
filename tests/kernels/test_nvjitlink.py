"""nvJitLink: what it makes of real relocatable cubins, what it refuses, and how it is found."""

from __future__ import annotations

import pickle

import pytest

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels import nvidia_wheels, nvjitlink, nvrtc
from onnx_sparseconv.kernels.nvrtc import Program
from onnx_sparseconv.kernels.targets import known_architectures
from tests.support.gpu_images import ELF, needs_nvjitlink

PAIRS = [
    pytest.param(compiler, nvjitlink.find(compiler.version), id=f"NVRTC {compiler.version[0]}")
    for compiler in nvrtc.installed()
    if nvjitlink.find(compiler.version)
]
KERNEL = (
    'extern "C" __device__ void g(int* y);\nextern "C" __global__ __launch_bounds__(64) void a_kernel(int* y) { g(y); }'
)
FUNCTION = 'extern "C" __device__ __noinline__ void g(int* y) { *y = 1; }'


def compile_part(compiler, source, architecture):
    options = (f"--gpu-architecture=sm_{architecture}", "--relocatable-device-code=true")
    return compiler.compile(Program(source, options=options)).cubin


@pytest.mark.parametrize(("compiler", "linker"), PAIRS)
def test_parts_of_any_architecture_become_one(compiler, linker):
    for architecture in known_architectures(compiler):
        parts = [compile_part(compiler, source, architecture) for source in (KERNEL, FUNCTION)]
        cubin = linker.link(parts, architecture)
        assert cubin.startswith(ELF)
        assert b"a_kernel" in cubin
        assert cubin == linker.link(parts, architecture)


@pytest.mark.parametrize(("compiler", "linker"), PAIRS)
def test_parts_that_do_not_fit_are_refused(compiler, linker):
    kernel, function = (compile_part(compiler, source, 80) for source in (KERNEL, FUNCTION))
    for parts, architecture, call in (
        ([kernel], 80, "nvJitLinkComplete"),  # g is missing
        ([kernel, function], 75, "nvJitLinkAddData"),
        ([b"not a cubin"], 80, "nvJitLinkAddData"),
        ([kernel, function], 999, "nvJitLinkCreate for sm_999"),
    ):
        with pytest.raises(CompileError, match=rf"{call}.* of {linker.path} failed: \w") as caught:
            linker.link(parts, architecture)
        assert caught.value.log
    assert linker.link([function, kernel], 80)


@pytest.mark.parametrize(("compiler", "linker"), PAIRS)
def test_another_process_loads_the_same_file(compiler, linker):
    copy = pickle.loads(pickle.dumps(linker))
    assert (copy.path, copy.version) == (linker.path, linker.version)
    assert copy.name == "nvJitLink {}.{}".format(*copy.version)
    assert linker.version >= compiler.version


@needs_nvjitlink
def test_one_that_is_older_than_the_compiler_is_none():
    compiler = next(c for c in nvrtc.installed() if nvjitlink.find(c.version))
    major = compiler.version[0]
    assert nvjitlink.find((major, 99)) is None
    assert nvjitlink.how_to_install((major, 99)) == f"pip install '{nvjitlink.WHEELS[major]}>={major}.99'"


def test_where_there_is_none(monkeypatch):
    monkeypatch.setattr(nvjitlink, "WHEELS", {12: "no-such-wheel"})
    monkeypatch.setattr(nvjitlink, "_LOADER_NAME", "libno-such-nvjitlink.so.{}")
    assert nvjitlink.find((12, 0)) is None
    assert nvjitlink.find((11, 0)) is None


def test_one_without_the_functions_is_none(monkeypatch):
    monkeypatch.setattr(nvidia_wheels, "wheel_files", lambda _wheel, _library: iter(["libm.so.6"]))
    assert nvjitlink.find((12, 0)) is None
    assert nvjitlink.how_to_install((12, 0)) == "pip install 'nvidia-nvjitlink-cu12>=12.9'"
