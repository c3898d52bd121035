"""The GPU benchmark with the CPU in the place of the GPU: all but its figures are real."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from onnx_sparseconv.errors import ModelError

pytest.importorskip("onnxruntime")


@pytest.fixture
def small():
    from suite_rows import Layer, SuiteRow

    return SuiteRow(Layer("small", 8, 16, 9, 9, 3, 1, 1, 1), (0.8, 0.9), (2, 1))


def _job(small, **changes):
    from gpu import GpuJob

    return dataclasses.replace(
        GpuJob(small.layer, 0.9, 2, "float32", kernels=("csr",), seconds=0.0, bandwidth=1e12), **changes
    )


def _options(tmp_path, **changes):
    defaults = {
        "suite": ["gpu"],
        "layers": None,
        "dtype": ["float32"],
        "sparsity": [],
        "batch": [],
        "prepare": None,
        "prepared": None,
        "target": [],
        "kernel": ["auto"],
        "config": [],
        "dense_only": False,
        "bandwidth": None,
        "cache_mb": 60,
        "minutes": math.inf,
        "timeout": 60.0,
        "resume": False,
        "seconds": 0.0,
        "output": tmp_path / "out.json",
    }
    return SimpleNamespace(**defaults | changes)


def test_the_suite_holds_the_layers_and_settings_to_be_measured():
    from gpu import grid
    from suite_rows import read_rows

    rows = {row.layer.name: row for row in read_rows("gpu")}
    assert len(rows) == 14
    assert rows["3x3_64-64@56"].sparsities == (0.8, 0.9, 0.95)
    assert rows["text_cnn_f2"].batches == (128,)
    assert rows["text_cnn_f3"].layer.weight_shape == (100, 300, 3)
    assert all(row.layer.out_sizes for row in rows.values())
    cells = grid(rows.values(), ["float32", "float16"], [], [])
    assert len(cells) == len({(layer.name, batch, dtype, s) for layer, batch, dtype, s in cells}) == 104
    assert {(b, s) for _, b, _, s in grid(rows.values(), ["float32"], [0.5], [4])} == {(4, 0.5)}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_a_layer_is_timed_in_every_mode_and_compared_with_float64(small, dtype):
    from gpu import measure_job

    record = json.loads(json.dumps(measure_job(_job(small, dtype=dtype))))
    assert [(c["model"], c["mode"], c["problem"]) for c in record["candidates"]] == [
        *(("dense", mode, "") for mode in ("default", "nhwc", "graph", "nhwc+graph")),
        *(("sparse", mode, "") for mode in ("default", "graph")),
    ]
    assert all(c["median_us"] > 0 and c["burst_us"] > 0 for c in record["candidates"])
    assert record["candidates"][-1]["kernel"]["kernel"].startswith("cuda.")
    assert record["best"] in record["comparisons"].keys() == {"plain", "graph"}
    best = record["comparisons"][record["best"]]
    assert best["dense_us"] == min(c["median_us"] for c in record["candidates"] if c["model"] == "dense")
    assert best["speedup"] == best["dense_us"] / best["sparse_us"]
    flops = 2 * 2 * 81 * 16 * 8 * 9
    assert best["dense_tflops"] == pytest.approx(flops / best["dense_us"] / 1e6)
    size = np.dtype(dtype).itemsize
    floor = (2 * 81 * (8 + 16) + record["nonzeros"]) * size / 1e12 * 1e6
    assert record["floor_us"] == pytest.approx(floor)
    assert best["share_of_floor"] == pytest.approx(floor / best["sparse_us"])
    assert set(record["errors"]) == {"dense default", "dense nhwc", "sparse default csr"}
    bound = 1e-6 if dtype == "float32" else 1e-3
    assert all(0 < error["rms_relative"] < bound and not error["num_nonfinite"] for error in record["errors"].values())
    assert best["error_ratio"] == pytest.approx(
        record["errors"]["sparse default csr"]["rms"] / record["errors"]["dense default"]["rms"]
    )


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_a_mode_that_fails_is_recorded_beside_those_that_run(small, monkeypatch):
    import gpu

    make = gpu.make_session

    def refuse(model, **options):
        if options["provider_options"].get("enable_cuda_graph"):
            raise ModelError("no graphs here")
        return make(model, **options)

    monkeypatch.setattr(gpu, "make_session", refuse)
    record = gpu.measure_job(_job(small))
    assert [c["problem"] for c in record["candidates"]] == [*["", "", *["no graphs here"] * 2], "", "no graphs here"]
    assert list(record["comparisons"]) == ["plain"]
    dense = gpu.measure_job(_job(small, kernels=()))
    assert "sparse_us" not in dense["comparisons"]["plain"]


@pytest.mark.usefixtures("cuda_on_cpu")
def test_a_sparse_node_on_the_cpu_is_not_taken_for_a_measurement(small):
    from gpu import measure_job
    from gpu_session import describe

    record = measure_job(_job(small))
    assert all("SparseConv nodes on cpu" in c["problem"] for c in record["candidates"] if c["model"] == "sparse")
    assert "SparseConv nodes on cpu" in describe(record)


@pytest.mark.usefixtures("cuda_on_cpu")
def test_the_launch_floor_is_measured_with_and_without_a_graph():
    from gpu import measure_floor

    floor = measure_floor(0.0)
    assert all(floor[name]["median_us"] > 0 for name in ("plain", "graph"))


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_prepared_layers_are_what_is_measured(small, tmp_path):
    from gpu import grid, measure_job, prepare, prepared_name, read_prepared
    from gpu_session import make_jobs

    cells = grid([small], ["float32"], [], [])
    said = []
    assert prepare(tmp_path / "p", cells, [], 2, said.append) == 0
    entries = read_prepared(tmp_path / "p")
    assert sorted(entries) == [prepared_name(small.layer, s, "float32") for s in (0.8, 0.9)]
    assert len(said) == 2
    assert all(entry["bytes"] == (tmp_path / "p" / name).stat().st_size for name, entry in entries.items())
    jobs = make_jobs(_options(tmp_path, prepared=tmp_path / "p", config=["a=b"]), cells, 0.0)
    assert [job.key for job in jobs] == [("small", s, b, "float32") for b in (2, 1) for s in (0.8, 0.9)]
    assert all(job.converted and job.weights and job.config == {"a": "b"} for job in jobs)
    assert measure_job(jobs[0])["floor_us"] is None
    with pytest.raises(ValueError, match="other weights"):
        measure_job(dataclasses.replace(jobs[0], weights="0" * 64))
    (unprepared,) = make_jobs(_options(tmp_path, prepared=tmp_path / "p"), [(small.layer, 1, "float16", 0.9)], 0.0)
    assert unprepared.converted is None


class _Worker:
    """Fails on some layers, and notes what it was asked."""

    def __init__(self, failing=()):
        self.failing, self.asked, self.closed = failing, [], False

    def close(self):
        self.closed = True

    def ask(self, task, _timeout):
        from worker import WorkFailedError

        kind, job = task
        if kind == "floor":
            return {}
        self.asked.append(job.key)
        if job.batch in self.failing:
            raise WorkFailedError("its process ended with code -11")
        best = {"dense_us": 2.0, "dense_mode": "nhwc"}
        record = {"candidates": [], "comparisons": {"plain": best}, "best": "plain", "libraries": {"cudnn": "9"}}
        return {**job.describe(), **record}


def _measure(worker, small, tmp_path, **changes):
    import gpu_session

    options = _options(tmp_path, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_session, "selected_rows", lambda _: [small])
        patch.setattr(gpu_session, "Worker", lambda _: worker)
        code = gpu_session.run_gpu(options, {"command": f"number {options.resume}"})
    return code, json.loads(options.output.read_text())


def test_a_failed_layer_is_a_record_and_the_others_are_measured_and_resumed(small, tmp_path):
    worker = _Worker(failing=(2,))
    failed, results = _measure(worker, small, tmp_path)
    assert (failed, worker.closed) == (1, True)
    assert [record.get("problem", "") for record in results["layers"]] == ["its process ended with code -11"] * 2 + [
        ""
    ] * 2
    assert (results["num_missing"], results["libraries"]) == (0, {"cudnn": "9"})
    second = _Worker()
    failed, results = _measure(second, small, tmp_path, resume=True)
    assert failed == 0
    assert second.asked == [("small", 0.8, 2, "float32"), ("small", 0.9, 2, "float32")]
    assert len(results["layers"]) == 4
    assert not any("problem" in record for record in results["layers"])
    assert all("commit" in record for record in results["layers"])
    assert [session["command"] for session in results["earlier_sessions"]] == ["number False"]
    assert results["command"] == "number True"


def test_without_cuda_nothing_is_measured(small, tmp_path, capsys):
    class Broken(_Worker):
        def ask(self, *_):
            from worker import WorkFailedError

            raise WorkFailedError("ProviderError: no CUDA")

    from gpu_session import make_jobs, measure_all

    options = _options(tmp_path)
    assert measure_all(make_jobs(options, [(small.layer, 1, "float32", 0.9)], 0.0), {"layers": []}, Broken(), options)
    assert "nothing can be measured: ProviderError: no CUDA" in capsys.readouterr().err
    assert not options.output.exists()


def test_no_layer_starts_when_the_time_is_over(small, tmp_path):
    worker = _Worker()
    _, results = _measure(worker, small, tmp_path, minutes=0)
    assert worker.asked == []
    assert (results["num_missing"], results["layers"]) == (4, [])


def test_a_killed_session_keeps_what_it_has(small, tmp_path):
    class Killed(_Worker):
        def ask(self, task, timeout):
            if len(self.asked) == 2:
                raise KeyboardInterrupt
            return super().ask(task, timeout)

    with pytest.raises(KeyboardInterrupt):
        _measure(Killed(), small, tmp_path)
    assert len(json.loads((tmp_path / "out.json").read_text())["layers"]) == 2


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_the_table_is_made_of_the_records(small, tmp_path, monkeypatch):
    import figures
    from gpu import measure_job

    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert figures.gpu_layers_table("gpu-layers") == figures.NOT_MEASURED
    job = _job(small)
    records = [measure_job(job), measure_job(dataclasses.replace(job, kernels=())), {**job.describe(), "problem": "x"}]
    (tmp_path / "gpu-layers.json").write_text(json.dumps({"layers": records}))
    head, rule, full, dense_only, failed = figures.gpu_layers_table("gpu-layers").splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (head, rule, full, dense_only, failed)]
    assert len({len(row) for row in cells}) == 1
    assert cells[2][:4] == ["small", "float32", "0.9", "2"]
    best = records[0]["comparisons"][records[0]["best"]]
    assert cells[2][8] == f"{best['speedup']:.2f}x"
    assert cells[3][6:] == ["-"] * 9
    assert cells[4][4] == "failed"


def test_the_bandwidth_has_a_source():
    from memory_floor import memory_bandwidth

    assert memory_bandwidth(None, "NVIDIA H200") == (4.8e12, "data sheet of NVIDIA H200")
    assert memory_bandwidth(4300.0, "NVIDIA H200") == (4.3e12, "given by --bandwidth")
    assert memory_bandwidth(None, "another") == (0.0, "")


def test_the_state_of_a_gpu_is_read_or_empty(monkeypatch):
    import gpu

    text = "NVIDIA H200, 580.1, 1980 MHz, 1980 MHz, 3201 MHz, 100 W, 700 W, 40, 143771 MiB\n"
    monkeypatch.setattr(gpu.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout=text))
    assert gpu.read_gpu_state()["clocks.sm"] == "1980 MHz"

    def absent(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(gpu.subprocess, "run", absent)
    assert gpu.read_gpu_state() == {}


def test_the_command_line_knows_what_it_needs(monkeypatch, capsys):
    import run

    monkeypatch.setattr(sys, "argv", ["run.py", "--provider", "cuda", "--suite", "gpu", "--prepare", "p"])
    options = run.parse_arguments()
    assert (options.dtype, options.target) == (["float32", "float16"], ["sm_90"])
    monkeypatch.setattr(sys, "argv", ["run.py", "--suite", "cpu"])
    with pytest.raises(SystemExit):
        run.parse_arguments()
    assert "--output" in capsys.readouterr().err


@pytest.mark.usefixtures("cuda_on_cpu", "sparse_kernels_say_cuda")
def test_models_run_with_a_graph_and_without_and_a_refusal_is_a_record(tmp_path, monkeypatch):
    import run

    from onnx_sparseconv.runtime import bench as bench_module
    from tests.runtime import networks

    weights = networks.weights()
    pair = (
        networks.save(networks.dense(weights), tmp_path / "d.onnx"),
        networks.save(networks.sparse(weights), tmp_path / "s.onnx"),
    )
    load = bench_module._load

    def refuse(side, mode, clock):
        if mode is not None and mode.cuda_graph:
            raise ModelError("no graphs here")
        return load(side, mode, clock)

    output = tmp_path / "out.json"
    arguments = ["--provider", "cuda", "--models", ":".join(map(str, pair)), "--seconds", "0", "-o", str(output)]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    monkeypatch.setattr(bench_module, "_load", refuse)
    assert run.main() == 0
    plain, refused = json.loads(output.read_text())["models"]
    assert (plain["original"]["path"], plain["speedup"]["of_medians"] > 0) == ("d.onnx", True)
    assert refused["problem"] == "no graphs here"
