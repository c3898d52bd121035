import locale
import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels import nvrtc
from onnx_sparseconv.kernels.nvrtc import Program

KERNEL = '#include "factor.h"\nextern "C" __global__ void scale(float* x) { x[threadIdx.x] *= FACTOR; }\n'
HEADERS = {"factor.h": "#define FACTOR 2.5f\n"}
CUBIN_MAGIC = b"\x7fELF"

pytestmark = pytest.mark.skipif(not nvrtc.installed(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc-cu12")


def program(*options, source=KERNEL, headers=None):
    return Program(source, "scale.cu", HEADERS if headers is None else headers, options)


@pytest.fixture(params=nvrtc.installed(), ids=lambda found: found.name)
def compiler(request):
    return request.param


def test_a_virtual_architecture_gives_ptx_only(compiler):
    compiled = compiler.compile(program("--gpu-architecture=compute_75"))
    assert b".target sm_75" in compiled.ptx
    assert b".entry scale" in compiled.ptx
    assert b"0f40200000" in compiled.ptx  # 2.5: the header was read
    assert b"\0" not in compiled.ptx
    assert compiled.cubin == b""
    assert compiled.log == ""


def test_a_real_architecture_gives_a_cubin(compiler):
    compiled = compiler.compile(program("--gpu-architecture=sm_80", "--ptxas-options=-v"))
    assert compiled.cubin.startswith(CUBIN_MAGIC)
    assert b"scale" in compiled.cubin
    assert "Used" in compiled.log
    assert "registers" in compiled.log


def test_equal_programs_give_equal_code(compiler):
    options = ("--gpu-architecture=sm_90", "--std=c++17")
    assert compiler.compile(program(*options)).cubin == compiler.compile(program(*options)).cubin


def test_architectures(compiler):
    architectures = compiler.supported_architectures()
    assert list(architectures) == sorted(architectures)
    assert {75, 80, 86, 89, 90} <= set(architectures)
    assert (120 in architectures) == (compiler.version >= (12, 8))


def test_a_broken_program_is_an_error_with_its_log(compiler):
    with pytest.raises(CompileError, match=r"scale\.cu\(1\): error: .*undefined") as caught:
        compiler.compile(program(source="__global__ void scale() { undefined; }\n"))
    assert str(caught.value).startswith(f"{compiler.name} cannot compile scale.cu: ")
    assert "\n" not in str(caught.value)
    assert "1 error detected" in caught.value.log
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.log) == (str(caught.value), caught.value.log)


@pytest.mark.parametrize(
    ("options", "source"),
    [(("--no-such-option",), KERNEL), (("--gpu-architecture=sm_12",), KERNEL), ((), '#include "missing.h"\n')],
    ids=["option", "architecture", "header"],
)
def test_what_else_nvrtc_refuses(compiler, options, source):
    with pytest.raises(CompileError, match=r"no-such-option|sm_12|gpu-architecture|missing\.h"):
        compiler.compile(program(*options, source=source))


def test_warnings_are_handed_over(compiler):
    source = 'extern "C" __global__ void f() { int unused; }\n'
    assert "unused" in compiler.compile(program(source=source)).log


def test_threads_compile_at_once(compiler):
    sources = [KERNEL.replace("FACTOR", f"{i}.5f") for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        made = list(
            pool.map(lambda s: compiler.compile(program("--gpu-architecture=compute_80", source=s)).ptx, sources)
        )
    assert len(set(made)) == len(sources)


def _cubin_size(found):
    return len(found.compile(program("--gpu-architecture=sm_75")).cubin)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads: the child only compiles
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_compile(compiler, method):
    expected = _cubin_size(compiler)
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        assert pool.submit(_cubin_size, compiler).result() == expected


def test_versions_are_found_and_preferred():
    found = {one.version[0]: one for one in nvrtc.installed()}
    for major, one in found.items():
        assert nvrtc.find(major).version == one.version
        assert nvrtc.find(preferred=(major, 12, 13)).version == one.version
        assert nvrtc.find(path=one.path).version == one.version
        assert nvrtc.find(major, path=one.path).name == one.name
    assert nvrtc.find().version[0] == min(found)


def test_a_path_with_another_version_is_an_error():
    one = nvrtc.installed()[0]
    with pytest.raises(CompileError, match=f"is {one.name}, but version 11 was asked for"):
        nvrtc.find(11, path=one.path)


def test_a_missing_nvrtc_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nvrtc, "WHEELS", {12: "no-such-wheel-12", 13: "no-such-wheel-13"})
    monkeypatch.setattr(nvrtc, "_LOADER_NAME", "libno-such-nvrtc.so.{}")
    with pytest.raises(CompileError) as caught:
        nvrtc.find()
    assert str(caught.value) == (
        "NVRTC 12 or 13, which compiles GPU kernels, is not installed: "
        "`pip install no-such-wheel-12` or `pip install no-such-wheel-13`"
    )
    assert nvrtc.installed() == ()
    with pytest.raises(CompileError, match=r"^NVRTC 11, which compiles GPU kernels, is not installed$"):
        nvrtc.find(11)


def test_the_locale_stays(compiler):
    before = locale.getpreferredencoding(do_setlocale=False)
    compiler.compile(program("--gpu-architecture=compute_75"))
    with pytest.raises(CompileError):
        compiler.compile(program("--gpu-architecture=compute_75", source="?"))
    assert locale.getpreferredencoding(do_setlocale=False) == before
