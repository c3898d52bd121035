from __future__ import annotations

import pytest

from onnx_sparseconv.errors import ReportError
from onnx_sparseconv.report import read_folder, read_report
from onnx_sparseconv.report.data import Outcome
from tests.report import documents


def test_a_tuned_conversion():
    report = read_report(documents.conversion(tuned=documents.decisions()))
    assert (report.name, report.outcome, report.num_sparse, report.gain) == ("net.onnx", Outcome.CONVERTED, 1, True)
    (layer,) = report.layers
    assert (layer.times[0].dense_us, layer.times[0].sparse_us, layer.times[0].speedup) == (200, 100, 2)
    assert (layer.plan, layer.reason, layer.text) == ("sparse", "decided-sparse", "why conv")
    (case,) = report.cases
    assert (case.label, case.batch, case.speedup, case.predicted_us, case.low) == ("x 1x3x224x224", 1, 2, 480, 1.9)
    assert report.peaks.flops_per_s == 2e11
    assert report.versions == (("onnx-sparseconv", "0.1.0"),)
    assert ("processor", "an abacus") in report.setting


def test_layers_that_were_timed_in_half_precision_are_not_float():
    tuned = documents.decisions()
    tuned["setting"]["precision"] = "fp16"
    assert read_report(documents.conversion(tuned=tuned)).layers[0].dtype == "float16"


def test_without_times_there_are_none():
    report = read_report(documents.conversion())
    assert (report.cases, report.has_layer_times, report.speedup, report.gain) == ((), False, None, None)


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ({"output": None}, Outcome.WOULD_CONVERT),
        ({"converted": False, "output": None}, Outcome.NOTHING),
        ({"converted": False, "already_converted": True}, Outcome.ALREADY),
        ({"converted": False, "imaged_bytes_after": 7}, Outcome.IMAGES),
        ({"converted": False, "precision": {"changed": True, "half_nodes": 3, "casts": 1, "kept": []}}, Outcome.HALF),
        ({"model": None, "error": "bad file"}, Outcome.ERROR),
    ],
)
def test_outcomes(more, outcome):
    assert read_report(documents.conversion(**more)).outcome is outcome


def test_layers_of_one_name_are_told_apart_by_their_order_and_graph():
    layers = [documents.layer("c"), documents.layer("c", sparse=False), documents.layer("c", graph="If/then")]
    tuned = documents.decisions(
        [
            documents.decision("c", graph="If/then", dense_us=(3.0,)),
            documents.decision("c", number=1, dense_us=(2.0,), sparse=False),
            documents.decision("c", dense_us=(1.0,)),
        ]
    )
    report = read_report(documents.conversion(layers, tuned))
    assert [layer.times[0].dense_us for layer in report.layers] == [1, 2, 3]


def test_of_several_candidates_the_fastest_counts_and_one_that_cannot_run_does_not():
    candidates = [
        {"name": "dense, a", "choice": "dense", "times_us": [30.0, 10.0]},
        {"name": "dense, b", "choice": "dense", "times_us": [20.0, 15.0]},
        {"name": "sparse, csr", "choice": "sparse", "times_us": [9.0, 8.0]},
        {"name": "sparse, generated", "choice": "sparse", "times_us": [None, 1.0]},
        {"name": "sparse, only looked at", "choice": "sparse", "times_us": [0.1, 0.1], "counts": False},
    ]
    tuned = documents.decisions([documents.decision(candidates=candidates)], batches=(1, 8))
    (layer,) = read_report(documents.conversion(tuned=tuned)).layers
    assert [(time.dense_us, time.sparse_us) for time in layer.times] == [(20, 9), (10, 1)]
    assert layer.plan == "sparse, csr"


def test_a_decisions_file_and_what_tune_prints():
    tuned = documents.decisions([documents.decision(), documents.decision("other", sparse=False, advice="sparse")])
    file = {"schema_version": 1, "kind": "onnx-sparseconv decisions", **tuned}
    printed = {"schema_version": 1, "command": "tune", "decisions": tuned, "gain": True}
    for document in (file, printed):
        report = read_report(document)
        assert (report.outcome, report.num_sparse, report.num_by_hand) == (Outcome.TUNED, 1, 1)
        assert report.layers[0].times[0].speedup == 2


def test_errors_of_outputs():
    (error,) = read_report(documents.conversion(), verify=documents.verification()).errors
    assert (error.name, error.passed, error.max_of_range, error.snr_db) == ("y", True, 2e-7, 120.5)
    with pytest.raises(ReportError, match="sparseconv verify"):
        read_report(documents.conversion(), verify=documents.benchmark())


def test_a_bench_gives_the_model_its_time_and_layers_theirs_where_none_were_tuned():
    report = read_report(documents.conversion(), bench=documents.benchmark())
    assert (report.speedup, report.gain, report.cases[0].batch) == (pytest.approx(3), True, 4)
    assert report.layers[0].times[0].sparse_us == 300
    assert not report.timed_alone
    tuned = documents.conversion(tuned=documents.decisions())
    assert read_report(tuned, bench=documents.benchmark()).layers[0].times[0].sparse_us == 100
    two = documents.conversion(tuned=documents.decisions([], batches=(1, 8)))
    with pytest.raises(ReportError, match="for several"):
        read_report(two, bench=documents.benchmark())


def test_a_name_that_two_layers_share_takes_no_time_from_a_bench():
    bench = documents.benchmark()
    bench["layers"] *= 2
    assert not read_report(documents.conversion(), bench=bench).has_layer_times


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ([], "not an object"),
        ({}, "no 'schema_version'"),
        ({"schema_version": 1, "command": "doctor"}, "neither what"),
        ({"schema_version": 2, "command": "convert"}, "schema_version"),
        (documents.conversion(source=3), "'source' must be text"),
        (documents.conversion(bytes_before=-1), "'bytes_before'"),
        (documents.conversion([documents.layer(sparsity=1.5)]), "'sparsity' must be a number from 0 to 1"),
        (documents.conversion([documents.layer(weight_shape=["a"])]), "'weight_shape' must be a list of sizes"),
        (documents.conversion(model={"layers": [3]}), "'layers' 1: is not an object"),
        (documents.conversion(tuned=documents.decisions([documents.decision(dense_us=(-1.0,))])), "'times_us'"),
        (documents.conversion(tuned=documents.decisions([documents.decision(dense_us=(True,))])), "'times_us'"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(document, says):
    with pytest.raises(ReportError, match=says) as caught:
        read_report(document, where="r.json")
    assert "r.json" in str(caught.value)


def test_several_models():
    documents_ = [documents.conversion(), {**documents.conversion(), "up_to_date": True}]
    folder = read_folder(documents_, title="models", pages=["a.html", "b.html"])
    assert [(entry.page, entry.fresh) for entry in folder.entries] == [("a.html", True), ("b.html", False)]
    assert folder.created == "2026-01-02 03:04 UTC"


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_convolutions_that_a_pass_made_are_of_the_model(command):
    found = documents.verification() if command == "verify" else documents.benchmark()
    found["kernels"] = [{"node": "norm", "op_type": "SparseConv", "kernel": "cpu.avx512", "provider": "cpu"}]
    done = {"node": "norm", "graph": "", "text": "Relu 'relu'"}
    passes = [{"name": "FoldPad", "done": [{"node": "conv"}]}, {"name": "FuseScale", "changed": 1, "done": [done]}]
    report = read_report(documents.conversion(passes=passes), **{command: found})
    assert report.scales == {"norm"}


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_what_was_found_of_another_model_is_refused(command):
    found = documents.verification() if command == "verify" else documents.benchmark()
    found["kernels"] = [{"node": "elsewhere", "op_type": "SparseConv", "kernel": "cpu.avx512", "provider": "cpu"}]
    with pytest.raises(ReportError, match=f"the {command} report is for another model: .* no convolution 'elsewhere'"):
        read_report(documents.conversion(), **{command: found})
