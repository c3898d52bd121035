from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnx_sparseconv.errors import ModelError, NativeLibraryError, ProviderError, UsageError
from onnx_sparseconv.runtime import session as session_module
from onnx_sparseconv.runtime.kernels import DENSE_KERNEL, kernels_of, sparse_nodes
from onnx_sparseconv.runtime.run import run_model, run_session
from onnx_sparseconv.runtime.session import check_threads, make_session, onnxruntime_message
from tests.support.processes import environment

X = np.random.default_rng(0).standard_normal((2, 8, 12, 12)).astype(np.float32)


def test_a_model_runs_from_a_file_from_bytes_and_from_memory(pair):
    dense, sparse = pair
    expected = make_session(dense, use_library=False).run(None, {"x": X})[0]
    for model in (sparse, str(sparse), sparse.read_bytes(), onnx.load(str(sparse))):
        actual = make_session(model, threads=1).run(None, {"x": X})[0]
        np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_the_library_runs_the_nodes_and_only_when_it_is_asked_for(pair):
    nodes = sparse_nodes(onnx.load(str(pair[1])))
    assert nodes == (("conv0", "SparseConv"), ("conv1", "SparseConv"))
    session = make_session(pair[1])
    assert all(use.kernel.startswith("cpu.") for use in kernels_of(nodes, use_library=True))
    del session
    assert {use.kernel for use in kernels_of(nodes, use_library=False)} == {DENSE_KERNEL}


def test_the_callers_options_are_used(pair):
    options = ort.SessionOptions()
    make_session(pair[1], session_options=options, threads=1)
    assert options.intra_op_num_threads == 1


def test_a_profile_is_written(pair, tmp_path):
    session = make_session(pair[1], profile=tmp_path / "p")
    session.run(None, {"x": X})
    path = Path(session.end_profiling())
    assert path.parent == tmp_path
    assert any(event.get("args", {}).get("op_name") == "SparseConv" for event in json.loads(path.read_text()))


def test_an_instruction_set_can_be_forced(pair):
    session = make_session(pair[1], cpu_isa="portable")
    nodes = sparse_nodes(onnx.load(str(pair[1])))
    assert {use.kernel for use in kernels_of(nodes, use_library=True)} == {"cpu.portable"}
    del session


def test_bad_arguments_are_usage_errors(pair):
    with pytest.raises(UsageError, match="unknown provider 'tpu': use one of cpu, cuda"):
        make_session(pair[0], provider="tpu")
    with pytest.raises(UsageError, match="threads"):
        make_session(pair[0], threads=0)
    with pytest.raises(UsageError, match="threads must be at most"):
        make_session(pair[0], threads=20000)


@pytest.mark.parametrize(("processors", "most"), [(None, 64), (2, 64), (16, 64), (17, 68), (256, 1024)])
def test_threads_have_a_bound(processors, most, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    for number in (None, 1, most):
        check_threads(number)
    with pytest.raises(UsageError, match=f"threads must be at most {most} on this machine, got {most + 1}"):
        check_threads(most + 1)


def test_models_that_cannot_be_loaded_name_the_file(tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"garbage")
    with pytest.raises(ModelError, match=r"bad\.onnx"):
        make_session(tmp_path / "bad.onnx", use_library=False)
    with pytest.raises(ModelError, match="no such file"):
        make_session(tmp_path / "absent.onnx")
    with pytest.raises(ModelError, match="not a file"):
        make_session(tmp_path)
    with pytest.raises(ModelError, match="cannot load the model"):
        make_session(b"garbage", use_library=False)


def test_a_run_that_fails_names_the_model(pair):
    session = make_session(pair[1])
    with pytest.raises(ModelError, match="the model cannot be run"):
        run_session(session, {"x": X[:, :3]}, "the model")


def test_a_provider_that_is_not_built_in_is_an_error(pair, monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ProviderError, match="no CUDAExecutionProvider, only CPUExecutionProvider"):
        make_session(pair[0], provider="cuda")


class _SilentFallback:
    """What onnxruntime-gpu gives without a driver: a session that was asked for CUDA and runs on the CPU."""

    def __init__(self, *_args, providers, **_kwargs):
        assert providers[0][0] == "CUDAExecutionProvider"

    def disable_fallback(self):
        pass

    def get_providers(self):
        return ["CPUExecutionProvider"]


@pytest.mark.parametrize(("problem", "words"), [("no NVIDIA driver", "no NVIDIA driver"), ("", "cuDNN")])
def test_a_silent_fall_back_to_the_cpu_is_an_error_with_its_cause(pair, monkeypatch, problem, words):
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "InferenceSession", _SilentFallback)
    driver = session_module.read_cuda_driver()
    monkeypatch.setattr(session_module, "read_cuda_driver", lambda: type(driver)("", "", (), problem))
    with pytest.raises(ProviderError, match=f"CUDAExecutionProvider was asked for.*CPUExecutionProvider.*{words}"):
        make_session(pair[0], provider="cuda", use_library=False)


def test_a_missing_onnxruntime_says_what_to_install(pair, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(NativeLibraryError, match=r"pip install 'onnx-sparseconv\[cpu\]'"):
        make_session(pair[0])


def test_an_emptied_onnxruntime_says_what_to_do(pair, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", type(sys)("onnxruntime"))
    with pytest.raises(NativeLibraryError, match="force-reinstall"):
        make_session(pair[0])


def test_a_missing_library_is_an_error_unless_it_is_not_needed(pair, monkeypatch, tmp_path):
    monkeypatch.setenv("ONNX_SPARSECONV_LIBRARY", str(tmp_path / "absent.so"))
    with pytest.raises(NativeLibraryError, match=r"absent\.so"):
        make_session(pair[1])
    assert make_session(pair[1], use_library=False).run(None, {"x": X})[0].shape == X.shape


def test_errors_of_onnxruntime_lose_their_codes():
    assert onnxruntime_message(Exception("[ONNXRuntimeError] : 1 : FAIL : it\nbroke : here")) == "it broke : here"
    assert onnxruntime_message(Exception("plain")) == "plain"


def test_errors_of_this_package_are_not_mistaken_for_those_of_onnxruntime():
    with pytest.raises(KeyError), session_module.translated_errors("x"):
        raise KeyError("a bug")


def test_running_a_model_gives_its_outputs_by_name(pair):
    ticks = iter([1_000_000, 3_500_000])
    result = run_model(pair[1], {"x": X}, clock=lambda: next(ticks))
    assert result.outputs["y"].shape == X.shape
    assert result.time_us == 2500


@pytest.mark.usefixtures("cuda_on_cpu")
def test_a_run_whose_sparse_nodes_fell_back_to_the_cpu_is_an_error(pair):
    with pytest.raises(ProviderError, match="SparseConv nodes on cpu"):
        run_model(pair[1], {"x": X}, provider="cuda")
    assert run_model(pair[1], {"x": X}, provider="cuda", use_library=False).outputs["y"].shape == X.shape


def test_quiet_on_stdout_and_stderr(pair):
    script = f"from onnx_sparseconv.runtime.session import make_session; make_session({str(pair[1])!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment())
    assert (done.stdout, done.stderr) == ("", "")
