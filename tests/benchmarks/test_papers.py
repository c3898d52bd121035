"""A job of the papers' suites with the CPU in the place of the GPU: all but its figures are real."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from onnx_sparseconv.errors import ModelError
from tests.benchmarks.emulated_device import EmulatedDevice

pytest.importorskip("onnxruntime")


@pytest.fixture
def layer():
    from suite_rows import Layer

    return Layer("small", 8, 16, 9, 9, 3, 1, 1, 1)


@pytest.fixture
def job(layer):
    from papers import PaperJob

    return PaperJob(layer, 3, "float32", (0.8, 0.9), seconds=0.0)


def _measure(job, **changes):
    from papers import measure_paper_job

    changes = {"make_device": EmulatedDevice, **changes}
    device = changes.pop("make_device")
    record = measure_paper_job(dataclasses.replace(job, **changes), device)
    return json.loads(json.dumps(record))


def _by_baseline(record):
    found = {}
    for measured in record["measurements"]:
        found.setdefault(measured["baseline"], []).append(measured)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_everything_that_the_papers_compare_with_is_measured_and_right(job, dtype):
    found = _by_baseline(_measure(job, dtype=dtype))
    ours = {"sparse": 2, "csr": 1, "csr-1": 1, "csr-2": 1, "csr-4": 1, "csr-8": 1, "csr-unified": 1}
    dense = {"dense": 2, "half-in": 2, "half-out": 2, "half-both": 2, "cublas": 1, "cusparse": 2}
    exact = {"dense-fp32": 2, "cublas-fp32": 1} if dtype == "float32" else {}
    assert {name: len(measured) for name, measured in found.items()} == {**ours, **dense, **exact}
    bound = 1e-6 if dtype == "float32" else 2e-3
    for measured in (one for several in found.values() for one in several):
        assert measured["problem"] == ""
        assert measured["median_us"] > 0
        assert measured["burst_us"] > 0
        assert measured["num_runs"] > 0
        assert 0 < measured["error"]["rms_relative"] < bound
    assert [one["variant"] for one in found["dense"]] == ["graph", "nhwc+graph"]
    assert [one["sparsity"] for one in found["sparse"]] == [0.8, 0.9]
    assert found["csr-unified"][0]["sparsity"] == 0.9
    assert all(one["kernel"].startswith("cuda.") for one in found["sparse"] + found["csr"])
    assert {one["sparsity"] for one in found["cusparse"]} == {0.8, 0.9}
    assert found["cublas"][0]["variant"].endswith(", emulated")
    assert all(time_us > 0 for time_us in found["cublas"][0]["details"].values())
    unified = found["csr-unified"][0]["details"]
    assert unified["stored"] > unified["nonzeros"] == found["sparse"][1]["details"]["nonzeros"]


@pytest.mark.parametrize(("dtype", "count"), [("float32", 0), ("float16", 2)])
@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_beside_generated_code_the_kernels_on_tensor_cores_are_measured(job, dtype, count, monkeypatch):
    import papers

    describe = papers.describe_kernels
    monkeypatch.setattr(
        papers,
        "describe_kernels",
        lambda: [dataclasses.replace(one, kernel="cuda.generated(sm_90)") for one in describe()],
    )
    found = _by_baseline(_measure(job, dtype=dtype, baselines=()))
    assert [one["sparsity"] for one in found.get("library", ())] == [0.8, 0.9][:count]
    assert not any(one["problem"] for one in found.get("library", ()))


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_the_device_is_closed_when_all_is_timed(job):
    made = []

    def note(*arguments):
        made.append(EmulatedDevice(*arguments))
        return made[0]

    record = _measure(job, make_device=note, baselines=("cublas",), sparsities=(0.9,))
    assert made[0].is_closed
    assert record["libraries"]["emulated"] == "1"


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_a_thorough_job_has_the_csr_kernel_at_every_sparsity(job):
    found = _by_baseline(_measure(job, baselines=("csr", "unified"), is_thorough=True))
    assert [one["sparsity"] for one in found["csr"]] == [one["sparsity"] for one in found["csr-unified"]] == [0.8, 0.9]


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_what_was_not_asked_for_is_left_out(job):
    found = _by_baseline(_measure(job, baselines=(), sparsities=(0.9,)))
    assert {name: len(measured) for name, measured in found.items()} == {"dense": 2, "sparse": 1}


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_a_device_that_is_not_there_is_the_problem_of_its_baselines_alone(job):
    def absent(*_):
        raise ImportError("no\ncupy")

    record = _measure(job, make_device=absent, sparsities=(0.9,))
    found = _by_baseline(record)
    assert found["cublas"][0]["problem"] == found["cusparse"][0]["problem"] == "ImportError: no cupy"
    assert found["dense"][0]["median_us"] > 0


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_a_sparse_algorithm_that_fails_leaves_the_others(job):
    def half_of_them(*arguments):
        return EmulatedDevice(*arguments, failing=(6,))

    def none(*arguments):
        return EmulatedDevice(*arguments, failing=(6, 4))

    found = _by_baseline(_measure(job, make_device=half_of_them, baselines=("cusparse",)))
    assert [one["problem"] for one in found["cusparse"]] == ["", ""]
    assert all("algorithm 4" in one["variant"] for one in found["cusparse"])
    assert "RuntimeError: no algorithm 6" in found["cusparse"][0]["details"].values()
    found = _by_baseline(_measure(job, make_device=none, baselines=("cublas", "cusparse")))
    assert all("no algorithm 6" in one["problem"] for one in found["cusparse"])
    assert all(one["median_us"] is None for one in found["cusparse"])
    assert found["cublas"][0]["median_us"] > 0


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
@pytest.mark.parametrize(("broken", "words"), [("multiply", "wrong: an error of"), ("finish", "values not finite")])
def test_wrong_results_do_not_count(job, broken, words):
    class Broken(EmulatedDevice):
        def multiply(self, weight, lowered, product, shape):
            super().multiply(weight, lowered, product, shape)
            if broken == "multiply":
                size = shape.count * shape.rows * shape.columns
                self.memory.write(product, self._read(product, (size,)) * np.float32(1.1))

        def finish(self, product, y, bias, images, strides):
            if broken == "finish":
                self.memory.fill(y, 4, 0xFF)
            else:
                super().finish(product, y, bias, images, strides)

    (cublas, _) = _by_baseline(_measure(job, make_device=Broken, baselines=("cublas",)))["cublas"], None
    assert words in cublas[0]["problem"]
    assert cublas[0]["median_us"] is None


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_true_float32_that_is_not_is_told(job, monkeypatch):
    import papers

    monkeypatch.setattr(papers, "LARGEST_FLOAT32_ERROR", 1e-12)
    found = _by_baseline(_measure(job, baselines=("true-fp32",)))
    assert all("over 1e-12" in one["problem"] for one in found["dense-fp32"])
    assert not found["dense"][0]["problem"]


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_where_no_graph_can_be_captured_all_run_without(job, monkeypatch):
    import papers

    create = papers.make_session

    def refuse(model, **options):
        if options["provider_options"].get("enable_cuda_graph"):
            raise ModelError("no graphs here")
        return create(model, **options)

    monkeypatch.setattr(papers, "make_session", refuse)
    found = _by_baseline(_measure(job, baselines=("csr",)))
    assert [(one["variant"], one["problem"]) for one in found["dense"]] == [
        *(("graph", "ModelError: no graphs here"), ("nhwc+graph", "ModelError: no graphs here")),
        *(("default", ""), ("nhwc", "")),
    ]
    assert [one["variant"] for one in found["sparse"] + found["csr"]] == ["default"] * 3


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_a_layer_of_one_channel_has_no_half(layer, job):
    narrow = dataclasses.replace(layer, in_channels=1)
    found = _by_baseline(_measure(job, layer=narrow, baselines=("structured",), sparsities=(0.5,)))
    assert found["half-in"][0]["problem"] == found["half-both"][0]["problem"] == "the layer has one channel"
    assert not any(one["problem"] for one in found["half-out"])


@pytest.mark.usefixtures("cuda_on_cpu")
def test_a_sparse_node_on_the_cpu_is_not_taken_for_a_measurement(job):
    found = _by_baseline(_measure(job, baselines=()))
    assert all("SparseConv nodes on cpu" in one["problem"] for one in found["sparse"])


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_prepared_models_are_measured_and_other_weights_refused(layer, job, tmp_path):
    from gpu import prepare, prepared_name, read_prepared

    cells = [(layer, 3, "float32", sparsity) for sparsity in job.sparsities]
    assert prepare(tmp_path, cells, [], 1, lambda _: None) == 0
    names = {sparsity: prepared_name(layer, sparsity, "float32") for sparsity in job.sparsities}
    entries = read_prepared(tmp_path)
    files = {sparsity: str(tmp_path / name) for sparsity, name in names.items()}
    sums = {sparsity: entries[name]["weights"] for sparsity, name in names.items()}
    found = _by_baseline(_measure(job, converted=files, weights=sums, baselines=("unified",)))
    assert not any(one["problem"] for several in found.values() for one in several)
    with pytest.raises(ValueError, match="other weights"):
        _measure(job, weights={0.9: "0" * 64})


def test_unified_rows_compute_the_same_with_more_entries(layer):
    import onnxruntime as ort
    from csr_forms import with_unified_rows
    from layers import Setting, make_model

    import onnx_sparseconv as sc
    from onnx_sparseconv.custom_ops.node import attributes_from_proto

    converted, _ = sc.convert(make_model(layer, Setting(0.9, 2, 1)), options=sc.ConvertOptions(force=True))
    unified = with_unified_rows(converted.SerializeToString())
    import onnx

    (node,) = [n for n in onnx.load_model_from_string(unified.model).graph.node if n.op_type == "SparseConv"]
    values = attributes_from_proto(node).weight.values
    assert values.size == unified.stored
    assert unified.stored % layer.out_channels == 0
    assert np.signbit(values[values == 0]).all()
    assert int((values != 0).sum()) == unified.nonzeros < unified.stored
    x = np.random.default_rng(0).standard_normal((2, 8, 9, 9)).astype(np.float32)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    ours, theirs = (
        sc.make_session(model, session_options=options).run(None, {"x": x})[0]
        for model in (converted.SerializeToString(), unified.model)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="0 sparse convolutions"):
        with_unified_rows(make_model(layer, Setting(0.9, 2, 1)).SerializeToString())


@pytest.mark.parametrize("shape", [(8, 9, 9), (64, 224, 224)], ids=["within a block", "more than a block"])
def test_inputs_repeat_a_block_but_no_image(shape):
    from device_memory import HostMemory
    from papers import TiledInput

    memory, x, batch = HostMemory(), TiledInput(np.dtype(np.float16)), 4
    address = memory.allocate(batch * math.prod(shape) * 2)
    x.write(memory, address, batch * math.prod(shape))
    written = memory.read(address, (batch, *shape), np.dtype(np.float16))
    np.testing.assert_array_equal(x.images([0, 1, 3], shape), written[[0, 1, 3]])
    assert 0.9 < written.astype(np.float32).std() < 1.1
    assert (written[0] != written[1]).mean() > 0.9


def test_slow_candidates_are_timed_apart_and_less_often():
    from papers import Candidate, time_candidates

    now = [0]

    class Runs:
        def __init__(self, time_us):
            self.time_us, self.bursts = time_us, []

        def __call__(self):
            now[0] += self.time_us * 1000

        def burst(self, runs):
            self.bursts.append(runs)
            now[0] += runs * self.time_us * 900

    candidates = [
        Candidate("dense", "graph", runs=Runs(100)),
        Candidate("sparse", "graph", 0.9, runs=Runs(50)),
        Candidate("cusparse", "", 0.9, runs=Runs(5000)),
        Candidate("cublas", "", problem="failed"),
    ]
    time_candidates(candidates, 0.0, clock=lambda: now[0])
    dense, sparse, slow, failed = candidates
    assert [c.times.stats().median_us for c in candidates[:3]] == [100, 50, 5000]
    assert [c.burst_us for c in candidates[:3]] == pytest.approx([90, 45, 4500])
    assert (dense.times.stats().num_runs, slow.times.stats().num_runs) == (12, 4)
    assert (set(sparse.runs.bursts), set(slow.runs.bursts)) == ({20}, {3})
    assert failed.times is None
    assert failed.describe()["median_us"] is None
