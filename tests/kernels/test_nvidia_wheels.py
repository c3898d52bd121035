"""What all of NVIDIA's libraries have in common: how they are loaded, and what is said of those that do not work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels import fatbin, nvidia_wheels, nvjitlink, nvrtc
from onnx_sparseconv.kernels.fatbin import NvFatbin
from onnx_sparseconv.kernels.nvidia_wheels import MissingFunctionError
from onnx_sparseconv.kernels.nvjitlink import NvJitLink
from onnx_sparseconv.kernels.nvrtc import Nvrtc
from tests.support.processes import environment

LIBRARIES = [
    (Nvrtc, "NVRTC", "nvrtcVersion"),
    (NvFatbin, "nvFatbin", "nvFatbin"),
    (NvJitLink, "nvJitLink", "nvJitLink"),
]


@pytest.mark.parametrize(("library", "name", "function"), LIBRARIES)
def test_another_library_is_an_error(library, name, function):
    with pytest.raises(MissingFunctionError, match=rf"^libm\.so\.6 does not work as {name}: .*{function}"):
        library("libm.so.6")


@pytest.mark.parametrize("content", [None, b"not a library"], ids=["missing", "broken"])
@pytest.mark.parametrize(
    ("find", "name"),
    [
        (lambda: nvrtc.find(12), "NVRTC"),
        (lambda: fatbin.find(12), "nvFatbin"),
        (lambda: nvjitlink.find((12, 0)), "nvJitLink"),
    ],
    ids=["NVRTC", "nvFatbin", "nvJitLink"],
)
def test_a_wheel_whose_library_does_not_load_is_an_error(monkeypatch, tmp_path, name, find, content):
    path = tmp_path / "lib.so.12"
    if content is not None:
        path.write_bytes(content)
    for module in (nvidia_wheels, nvrtc):
        monkeypatch.setattr(module, "wheel_files", lambda _wheel, _library: iter([path]))
    with pytest.raises(CompileError, match=rf"/lib\.so\.12 does not work as {name}: ") as caught:
        find()
    assert not isinstance(caught.value, MissingFunctionError)


@pytest.mark.parametrize("content", [None, b"not a library"], ids=["missing", "broken"])
def test_a_path_that_is_no_library_is_an_error(tmp_path, content):
    path = tmp_path / "libnvrtc.so.12"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CompileError, match=r"libnvrtc\.so\.12 does not work as NVRTC: "):
        nvrtc.find(path=path)


@pytest.mark.parametrize("module", ["nvidia_wheels", "nvrtc", "fatbin", "nvjitlink"])
def test_importing_is_cheap(module):
    code = f"import sys, onnx_sparseconv.kernels.{module}; print([m for m in ('numpy', 'onnx') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert run.stdout.strip() == "[]"
