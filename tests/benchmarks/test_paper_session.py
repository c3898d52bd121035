"""Sessions of the papers' suites: what is measured once, what is resumed, and what a dead process costs."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import pytest

from onnx_sparseconv.errors import UsageError

pytest.importorskip("onnxruntime")


def _options(tmp_path, **changes):
    defaults = {
        "suite": ["dong2020"],
        "layers": ["lenet_1"],
        "dtype": ["float32"],
        "sparsity": [0.8, 0.9],
        "batch": [64],
        "prepare": None,
        "prepared": None,
        "baselines": None,
        "thorough": False,
        "target": [],
        "jobs": 1,
        "cache_mb": 60,
        "minutes": math.inf,
        "timeout": 60.0,
        "resume": False,
        "seconds": 0.0,
        "output": tmp_path / "out.json",
    }
    return SimpleNamespace(**defaults | changes)


def test_equal_layers_have_one_name_and_others_another():
    from paper_session import PAPER_SUITES
    from suite_rows import Layer, canonical, read_suite

    names = {}
    for suite in (*PAPER_SUITES, "gpu", "classes"):
        for layer in read_suite(suite):
            named = canonical(layer)
            assert names.setdefault(named.name, named) == named
    dong = [canonical(layer).name for layer in read_suite("dong2020")]
    assert dong[:3] == ["5x5_1-20@28p0", "5x5_20-50@12p0", "5x5_3-32@32"]
    assert {canonical(layer).name for layer in read_suite("gpu") if layer.kernel == 3 and layer.height > 1} == {
        layer.name for layer in read_suite("gpu") if layer.name.startswith("3x3")
    }
    assert canonical(Layer("x", 8, 8, 5, 7, 3, 2, 1, 4)).name == "3x3_8-8@5x7s2g4"
    assert canonical(Layer("x", 300, 100, 1, 56, 2, 1, 0, 1)).name == "1d2_300-100@56p0"


def test_the_suites_hold_the_papers_layers_and_figures():
    import csv

    from paper_session import plan_work
    from suite_rows import SUITES, canonical, read_rows, read_suite

    # Millions of operations at batch 64, as table 2 of Dong et al. counts them.
    wanted = [36.8, 204.8, 314.5, 838.8, 419.4, 14797.5, 14797.5, 11098.1, 236760.1, 118380]
    assert [layer.flops * 64 / 1e6 for layer in read_suite("dong2020")] == pytest.approx(wanted, rel=2e-3)
    assert len(read_suite("pietron-vgg16")) == 9
    pruned = {row.layer.name: row.sparsities for row in read_rows("pietron-vgg16-pruned")}
    assert pruned["256-256@56"] == (0.908,)
    sweep = read_rows("sweep")
    assert all((row.sparsities[0], row.sparsities[-1]) == (0.5, 0.99) for row in sweep)
    with (SUITES.parent / "reported.csv").open(newline="") as file:
        reported = list(csv.DictReader(line for line in file if not line.startswith("#")))
    for row in reported:
        if row["suite"] in ("pietron-vgg16", "pietron-vgg16-pruned"):
            assert row["layer"] in {layer.name for layer in read_suite(row["suite"])}
    work = plan_work([("dong2020", r) for r in read_rows("dong2020")], ["float16"], [], [64])
    both = plan_work(
        [(suite, r) for suite in ("dong2020", "pietron-vgg16") for r in read_rows(suite)], ["float16"], [], [64]
    )
    # Three of VGG's layers are Dong's as well.
    assert (len(work), len(both)) == (10, 10 + 9 - 3)
    assert len({canonical(item.layer).name for item in both}) == len(both)


def test_work_is_planned_batch_by_batch_each_layer_once():
    from paper_session import plan_work
    from suite_rows import Layer, SuiteRow

    one, same = (
        SuiteRow(Layer(name, 8, 8, 9, 9, 3, 1, 1, 1), s, b)
        for name, s, b in (("a", (0.8, 0.9), (128, 64)), ("b", (0.9, 0.95), (1, 64)))
    )
    rows = [("pietron-vgg16", one), ("dong2020", same)]
    planned = plan_work(rows, ["float32", "float16"], [], [])
    assert [(item.batch, item.dtype, item.sparsities, item.structured) for item in planned] == [
        (64, "float32", (0.8, 0.9, 0.95), True),
        (64, "float16", (0.8, 0.9, 0.95), True),
        (1, "float32", (0.9, 0.95), True),
        (1, "float16", (0.9, 0.95), True),
        (128, "float32", (0.8, 0.9), False),
        (128, "float16", (0.8, 0.9), False),
    ]
    assert [(item.batch, item.sparsities) for item in plan_work(rows, ["float32"], [0.5], [2])] == [(2, (0.5,))]


def test_layers_are_chosen_by_either_name_and_a_wrong_one_is_told():
    from paper_session import selected_rows

    assert [row.layer.name for _, row in selected_rows(["dong2020"], ["vgg_64@224"])] == ["vgg_64@224"]
    both = selected_rows(["dong2020", "pietron-vgg16"], ["3x3_64-64@224"])
    assert [(suite, row.layer.name) for suite, row in both] == [
        ("dong2020", "vgg_64@224"),
        ("pietron-vgg16", "64-64@224"),
    ]
    assert len(selected_rows(["dong2020"], None)) == 10
    with pytest.raises(UsageError, match="no layer of dong2020 is called vgg_9; there are 3x3"):
        selected_rows(["dong2020"], ["vgg_9"])


class _Worker:
    """Dies of the jobs that ``dies`` says, and notes what it was asked."""

    def __init__(self, dies=lambda _: False):
        self.dies, self.asked, self.closed = dies, [], False

    def close(self):
        self.closed = True

    def ask(self, task, _timeout):
        from worker import WorkFailedError

        kind, job = task
        if kind == "floor":
            return {}
        self.asked.append(job)
        if self.dies(job):
            raise WorkFailedError("its process ended with code -11")
        measured = [
            {"baseline": "sparse", "sparsity": s, "problem": "", "median_us": 2.0, "variant": "graph"}
            for s in job.sparsities
        ]
        return {**job.describe(), "measurements": measured, "seconds": 1.0, "libraries": {"cudnn": "9"}}


def _run(worker, tmp_path, **changes):
    import paper_session

    options = _options(tmp_path, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper_session, "Worker", lambda _: worker)
        code = paper_session.run_papers(options, {"command": "x"})
    return code, json.loads(options.output.read_text())


def test_only_missing_sparsities_are_measured_when_a_session_is_resumed(tmp_path):
    first = _Worker()
    code, results = _run(first, tmp_path)
    assert (code, first.closed, results["num_missing"]) == (0, True, 0)
    assert [job.sparsities for job in first.asked] == [(0.8, 0.9)]
    assert results["libraries"] == {"cudnn": "9"}
    assert all("commit" in record for record in results["layers"])
    second = _Worker()
    _, results = _run(second, tmp_path, resume=True, sparsity=[0.8, 0.9, 0.95], dtype=["float32", "float16"])
    assert [(job.dtype, job.sparsities) for job in second.asked] == [
        ("float32", (0.95,)),
        ("float16", (0.8, 0.9, 0.95)),
    ]
    assert len(results["layers"]) == 3
    assert len(results["earlier_sessions"]) == 1
    third = _Worker()
    _run(third, tmp_path, resume=True)
    assert third.asked == []


def test_a_job_that_dies_is_tried_without_the_lowered_matrices(tmp_path):
    worker = _Worker(dies=lambda job: "cublas" in job.baselines)
    layers = ["lenet_1", "lenet_2", "alexnet_1"]
    code, results = _run(worker, tmp_path, layers=layers)
    assert code == 0
    assert [record.get("lowered_problem", "") for record in results["layers"]] == [
        *["its process ended with code -11"] * 2,
        "",
    ]
    # After two of them, nobody tries any more.
    assert ["cublas" in job.baselines for job in worker.asked] == [True, False, True, False, False]


def test_a_job_that_dies_either_way_is_a_record_and_done_again_when_resumed(tmp_path):
    code, results = _run(_Worker(dies=lambda _: True), tmp_path)
    assert code == 1
    assert [record["problem"] for record in results["layers"]] == ["its process ended with code -11"]
    code, results = _run(_Worker(), tmp_path, resume=True)
    assert code == 0
    assert not any(record.get("problem") for record in results["layers"])


def test_no_job_starts_when_the_time_is_over(tmp_path):
    worker = _Worker()
    _, results = _run(worker, tmp_path, minutes=0)
    assert worker.asked == []
    assert (results["num_missing"], results["layers"]) == (1, [])


def test_without_cuda_nothing_is_measured(tmp_path, capsys):
    class Broken(_Worker):
        def ask(self, *_):
            from worker import WorkFailedError

            raise WorkFailedError("ProviderError: no CUDA")

    import paper_session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper_session, "Worker", lambda _: Broken())
        assert paper_session.run_papers(_options(tmp_path), {}) == 1
    assert "nothing can be measured: ProviderError: no CUDA" in capsys.readouterr().err


def test_structured_pruning_is_for_the_suite_that_has_it_unless_it_is_asked_for(tmp_path):
    from paper_session import make_jobs, plan_work, selected_rows
    from papers import BASELINES

    rows = selected_rows(["dong2020", "pietron-vgg16"], ["vgg_64@224", "512-512@14"])
    work = plan_work(rows, ["float16"], [], [64])
    dong, pietron = make_jobs(work, _options(tmp_path))
    assert dong.baselines == BASELINES
    assert pietron.baselines == tuple(name for name in BASELINES if name != "structured")
    asked = make_jobs(work, _options(tmp_path, baselines=["structured"]))
    assert [job.baselines for job in asked] == [("structured",)] * 2


def test_prepared_models_reach_their_jobs_and_what_is_lacking_is_told(tmp_path, capsys):
    import paper_session

    options = _options(
        tmp_path, suite=["dong2020"], layers=["lenet_1"], prepare=tmp_path / "p", prepared=tmp_path / "p"
    )
    assert paper_session.run_papers(options, {}) == 0
    rows = paper_session.selected_rows(["dong2020"], ["lenet_1"])
    work = paper_session.plan_work(rows, ["float32"], [0.8, 0.9, 0.95], [64])
    (job,) = paper_session.make_jobs(work, options)
    assert sorted(job.converted) == sorted(job.weights) == [0.8, 0.9]
    said = capsys.readouterr().err
    assert (
        "1 of 3 layers have no prepared model, and no generated kernel: 5x5_1-20_at_28p0-0.95-float32-batch-64.onnx"
        in said
    )
    assert job.converted[0.8].endswith("5x5_1-20_at_28p0-0.8-float32-batch-64.onnx")


def test_the_command_line(monkeypatch, capsys, tmp_path):
    import run

    def parse(*words):
        monkeypatch.setattr(sys, "argv", ["run.py", "--provider", "cuda", *words, "-o", str(tmp_path / "o.json")])
        return run.parse_arguments()

    assert (parse("--suite", "sweep").is_papers, parse("--suite", "sweep").seconds) == (True, 0.25)
    assert (parse("--suite", "gpu").is_papers, parse("--suite", "gpu").seconds) == (False, 1.0)
    assert parse("--suite", "sweep", "--seconds", "3").seconds == 3
    with pytest.raises(SystemExit):
        parse("--suite", "gpu", "sweep")
    assert "measured apart" in capsys.readouterr().err
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--provider", "cuda", "--suite", "sweep", "--layers", "x", "--prepare", str(tmp_path)]
    )
    with pytest.raises(SystemExit, match="error: no layer of sweep is called x"):
        run.main()
