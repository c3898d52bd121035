"""library.py: finding the library, registering it, describing its kernels."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.errors import NativeLibraryError
from tests.support.native_build import ROOT, find_tool
from tests.support.sparse_models import (
    SparseConvCase,
    geometry_2d,
    make_model,
    make_session,
    random_inputs,
    random_weight,
    supported_isas,
)

CASE = SparseConvCase(random_weight((4, 3, 3, 3), 0.5), geometry_2d())


def test_library_path_names_a_file(native_library):
    assert library.library_path() == native_library
    assert native_library.is_file()


def test_a_wrong_override_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(tmp_path / "nowhere.so"))
    with pytest.raises(NativeLibraryError, match=r"ONNX_SPARSECONV_LIBRARY names .*nowhere\.so"):
        library.library_path()
    with pytest.raises(NativeLibraryError, match="nowhere"):
        library.register(ort.SessionOptions())


def test_a_missing_library_says_where_and_what_to_do(monkeypatch, tmp_path):
    monkeypatch.delenv(library.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(library.resources, "files", lambda _: tmp_path)
    monkeypatch.setattr(library, "_installed_file", lambda: None)
    with pytest.raises(NativeLibraryError, match=r"no .*libonnx_sparseconv\.(so|dll); reinstall"):
        library.library_path()


def test_a_file_that_is_no_library_is_an_error(monkeypatch, tmp_path):
    path = tmp_path / "libonnx_sparseconv.so"
    path.write_text("no library")
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(path))
    with pytest.raises(NativeLibraryError, match="could not be registered"):
        library.register(ort.SessionOptions())
    with pytest.raises(NativeLibraryError, match="could not be loaded"):
        library.describe_kernels()


def test_registering_twice_is_harmless():
    options = ort.SessionOptions()
    library.register(options)
    library.register(options)
    model = make_model(CASE).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    assert session.run(None, random_inputs(CASE, (1, 3, 5, 5)))[0].shape == (1, 4, 5, 5)


def test_registering_again_for_another_instruction_set_is_an_error():
    options = ort.SessionOptions()
    library.register(options)
    with pytest.raises(NativeLibraryError, match=r"already registered .* cpu_isa='auto', not 'portable'"):
        library.register(options, cpu_isa="portable")


def test_registering_again_for_other_threads_is_an_error():
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    library.register(options)
    library.register(options)
    options.intra_op_num_threads = 16
    with pytest.raises(NativeLibraryError, match=r"already registered .* intra_op_num_threads=1, not 16; make new"):
        library.register(options)


def test_threads_of_a_shared_pool_are_not_the_options():
    options = ort.SessionOptions()
    if not hasattr(options, "use_per_session_threads"):
        pytest.skip(f"onnxruntime {ort.__version__} has no use_per_session_threads in Python")
    options.intra_op_num_threads = 1
    options.use_per_session_threads = False
    library.register(options)
    with pytest.raises(RuntimeError):
        options.get_session_config_entry(library.CPU_THREADS_KEY)


@pytest.mark.parametrize("value", ["sse9", "", "AVX2", "avx2 "])
def test_an_unknown_instruction_set_is_an_error(value):
    with pytest.raises(NativeLibraryError, match=r"'sparseconv\.cpu_isa' must be auto, portable, avx2 or avx512"):
        library.register(ort.SessionOptions(), cpu_isa=value)


@pytest.mark.parametrize("value", ["", "-1", "two", "2 ", "65537", "99999999999999999999"])
def test_an_impossible_number_of_threads_is_an_error(value):
    options = ort.SessionOptions()
    options.add_session_config_entry(library.CPU_THREADS_KEY, value)
    with pytest.raises(NativeLibraryError, match=r"'sparseconv\.cpu_threads' must be a number from 0 to 65536"):
        library.register(options)


def test_the_session_options_say_how_many_threads_there_are():
    options = ort.SessionOptions()
    options.intra_op_num_threads = 3
    library.register(options)
    assert options.get_session_config_entry(library.CPU_THREADS_KEY) == "3"

    chosen = ort.SessionOptions()
    chosen.intra_op_num_threads = 3
    chosen.add_session_config_entry(library.CPU_THREADS_KEY, "5")
    library.register(chosen)
    assert chosen.get_session_config_entry(library.CPU_THREADS_KEY) == "5"


def test_the_forced_instruction_set_is_the_one_that_runs():
    for isa in supported_isas():
        session = make_session(make_model(CASE), cpu_isa=isa)
        assert [kernel.kernel for kernel in library.describe_kernels()] == [f"cpu.{isa}"]
        del session


def test_describe_kernels_follows_the_sessions():
    assert library.describe_kernels() == []
    session = make_session(make_model(CASE))
    other = make_model(CASE)
    other.graph.node[0].name = 'a "quoted"\\name\nin two lines'
    other_session = make_session(other)
    for _ in range(3):
        session.run(None, random_inputs(CASE, (1, 3, 5, 5)))
    first, second = library.describe_kernels()
    best = f"cpu.{supported_isas()[-1]}"
    assert first == library.KernelInfo("conv1", "SparseConv", "cpu", best, 3)
    assert second == library.KernelInfo(other.graph.node[0].name, "SparseConv", "cpu", best, 0)
    del session
    assert library.describe_kernels() == [second]
    del other_session
    assert library.describe_kernels() == []


def test_describe_kernels_of_many_nodes():
    sessions = [make_session(make_model(CASE)) for _ in range(50)]
    assert len(library.describe_kernels()) == len(sessions)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Größe é 卷积 😀".encode(), "Größe é 卷积 😀"),
        (b"conv\xff1", "conv?1"),
        (b"\xc3", "?"),
        (b"\xc0\xaf\xe0\x80\x80\xed\xa0\x80\xf4\x90\x80\x80\xf0\x9f\x98", "?" * 15),
        (b"a\x80b\xc3\xa9c\xe5\x8d", "a?b\u00e9c??"),
    ],
)
def test_names_are_shown_as_far_as_they_are_text(name, shown):
    """A file may have any bytes in them."""
    model = make_model(CASE)
    model.graph.node[0].name = "~" * len(name)
    options = ort.SessionOptions()
    library.register(options)
    data = model.SerializeToString().replace(b"~" * len(name), name, 1)
    session = ort.InferenceSession(data, options)
    session.run(None, random_inputs(CASE, (1, 3, 5, 5)))
    assert library.describe_kernels()[-1].node == shown


def test_float16_and_float_nodes_live_in_one_session():
    half = SparseConvCase(CASE.weight, CASE.geometry, dtype=np.dtype(np.float16))
    for case in (CASE, half):
        (y,) = make_session(make_model(case)).run(None, random_inputs(case, (1, 3, 6, 6)))
        assert y.dtype == case.dtype


@pytest.mark.parametrize("x_shape", [None, [None] * 4, ["N", 3, None, 7], [1, 3, 6, 7]])
def test_nothing_is_logged_by_default(capfd, x_shape):
    """Sizes without a name, say, would make ONNX Runtime warn at every run."""
    options = ort.SessionOptions()
    library.register(options)
    model = make_model(CASE, x_shape=x_shape).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    session.run(None, random_inputs(CASE, (1, 3, 6, 7)))
    assert capfd.readouterr() == ("", "")


def test_importing_the_module_does_not_import_onnxruntime():
    code = "import sys, onnx_sparseconv.custom_ops.library; sys.exit('onnxruntime' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(library.__file__).parents[2])


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF symbol table")
def test_only_the_three_functions_are_exported(native_library):
    command = [find_tool("nm"), "-D", "--defined-only", native_library]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in symbols.splitlines()}
    assert names == {"RegisterCustomOps", "SparseConvDescribeKernels", "SparseConvVersion"}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="compiles for AVX")
@pytest.mark.parametrize(("name", "flags"), [("avx2", ["-mavx2", "-mfma", "-mf16c"]), ("avx512", ["-mavx512f"])])
def test_avx_files_share_no_code_with_others(name, flags, tmp_path):
    """An inline function emitted there could be the copy that the linker keeps, and run on machines without AVX."""
    source = ROOT / f"onnx_sparseconv/custom_ops/native/cpu/tile_kernel_{name}.cc"
    compiled = tmp_path / "kernel.o"
    subprocess.run([find_tool("g++", "c++"), "-std=c++17", "-O0", *flags, "-c", source, "-o", compiled], check=True)
    command = [find_tool("nm"), "--defined-only", "--extern-only", compiled]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(symbols) == 1, symbols


def test_version_is_that_of_the_distribution(native_library):
    version = ctypes.CDLL(str(native_library)).SparseConvVersion
    version.restype = ctypes.c_char_p
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{version().decode()}"' in text
