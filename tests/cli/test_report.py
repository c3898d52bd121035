"""``convert --report`` and ``sparseconv report``, with reports of real conversions."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from onnx_sparseconv.errors import ProviderError
from onnx_sparseconv.runtime.peaks import Peaks
from onnx_sparseconv.tuner import tuning
from tests.report.test_page import _Page
from tests.runtime import networks
from tests.tuner.fakes import FakeBench
from tests.tuner.plans import FAST


@pytest.fixture(autouse=True)
def _no_time_and_a_cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr("onnx_sparseconv.tuner.options.PRESETS", FAST)
    monkeypatch.setenv("ONNX_SPARSECONV_CACHE", str(tmp_path / "cache"))
    bench = FakeBench(whole_us=lambda sparse: 300 - 50 * len(sparse))
    monkeypatch.setattr(tuning, "OrtBench", lambda *_, **__: bench)
    peaks = Peaks(1e11, 1e10, "measured by nobody")
    monkeypatch.setattr("onnx_sparseconv.runtime.peaks.find_peaks", lambda *_: peaks)


def _page(path):
    return _Page(path.read_text(encoding="utf-8"))


def _charts(page):
    return [attributes for tag, attributes in page.elements if tag == "svg" and "role" in attributes]


def test_a_tuned_conversion_writes_a_page_with_all_charts(sparseconv, model, tmp_path):
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    result = sparseconv("convert", model, "-o", tmp_path / "o.onnx", "--tune", "--report", page, "--report", data)
    assert (result.exit_code, result.stderr) == (0, "")
    found = _page(page)
    assert "1.50\u00d7 faster. 2 of 2 convolutions became sparse." in found.text
    assert len(_charts(found)) == 4
    assert "measured by nobody" in found.text
    document = json.loads(data.read_text())
    assert document["decisions"]["setting"]["peaks"]["flops_per_s"] == 1e11
    assert document["model"]["layers"][0]["input_shape"] == [None, 32, 12, 12]
    assert document["model"]["layers"][0]["output_shape"] == [None, 32, 12, 12]
    assert document["versions"]["onnx"] == onnx.__version__
    again = tmp_path / "again.html"
    assert sparseconv("report", data, "-o", again).exit_code == 0
    assert again.read_text() == page.read_text()


def test_peaks_are_only_asked_for_where_they_are_shown(sparseconv, model, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr("onnx_sparseconv.runtime.peaks.find_peaks", refuse)
    assert sparseconv("convert", model, "-o", tmp_path / "o.onnx", "--tune").exit_code == 0


def test_peaks_that_cannot_be_found_cost_the_roofline_and_a_note(sparseconv, model, tmp_path, monkeypatch):
    def refuse(*_):
        raise ProviderError("the driver sulks")

    monkeypatch.setattr("onnx_sparseconv.runtime.peaks.find_peaks", refuse)
    page = tmp_path / "r.html"
    result = sparseconv("convert", model, "-o", tmp_path / "o.onnx", "--tune", "--report", page)
    assert result.exit_code == 0
    assert "the driver sulks" in result.stdout
    found = _page(page)
    assert len(_charts(found)) == 3
    assert "was not recorded" in found.text


def test_without_times_the_page_says_how_to_get_them(sparseconv, model, tmp_path):
    page = tmp_path / "r.html"
    assert sparseconv("convert", model, "-o", tmp_path / "o.onnx", "--report", page).exit_code == 0
    found = _page(page)
    assert _charts(found) == []
    assert "--tune" in found.text


def test_a_page_of_several_models_and_of_failures(sparseconv, model, dense_model, tmp_path):
    bad, page, data = tmp_path / "bad.onnx", tmp_path / "r.html", tmp_path / "r.json"
    bad.write_text("garbage")
    arguments = [bad, dense_model, model, "--out-dir", tmp_path / "out", "--report", page, "--report", data]
    assert sparseconv("convert", *arguments).exit_code == 1
    found = _page(page)
    for words in ("1 of 3 models converted.", "is not an ONNX model", "No convolution became sparse (too dense"):
        assert words in found.text
    assert sparseconv("report", data, "-o", tmp_path / "again.html").exit_code == 0
    assert "1 of 3 models converted." in _page(tmp_path / "again.html").text
    assert sparseconv("report", data, "-o", tmp_path / "x.html", "--verify", data).exit_code == 1


def test_a_page_of_decisions_and_of_what_tune_prints(sparseconv, model, tmp_path):
    decisions, printed, page = tmp_path / "d.json", tmp_path / "t.json", tmp_path / "r.html"
    printed.write_text(sparseconv("tune", model, "-o", decisions, "--json").stdout)
    for source in (decisions, printed):
        assert sparseconv("report", source, "-o", page).exit_code == 0
        assert "2 of 2 convolutions are chosen to be sparse." in _page(page).text


def test_a_page_of_a_converted_model_and_what_else_is_known_of_it(sparseconv, model, tmp_path):
    out, decisions, page = tmp_path / "o.onnx", tmp_path / "d.json", tmp_path / "r.html"
    sparseconv("tune", model, "-o", decisions)
    sparseconv("convert", model, "-o", out, "--min-sparsity", 0.5)
    assert sparseconv("report", out, "-o", page).exit_code == 0
    found = _page(page)
    assert "2 of 2 convolutions became sparse." in found.text
    assert "of its weights are zero" in found.text  # the reason, as it was recorded in the model
    verify = tmp_path / "v.json"
    sparseconv("verify", model, out, "-o", verify)
    arguments = ["report", out, "-o", page, "--decisions", decisions, "--verify", verify]
    assert sparseconv(*arguments).exit_code == 0
    found = _page(page)
    assert len(_charts(found)) == 4
    assert "within the tolerance" in found.text


def test_a_bench_gives_times_without_tuning(sparseconv, model, tmp_path):
    out, bench, data, page = (tmp_path / name for name in ("o.onnx", "b.json", "r.json", "r.html"))
    sparseconv("convert", model, "-o", out, "--report", data)
    sparseconv("bench", model, out, "--seconds", 0.1, "--threads", 1, "-o", bench)
    assert sparseconv("report", data, "-o", page, "--bench", bench).exit_code == 0
    found = _page(page)
    assert len(_charts(found)) == 3
    assert "within the model, by ONNX Runtime's profiler" in found.text


def test_hostile_names_of_nodes_and_files(sparseconv, tmp_path):
    layer_weights = networks.weights(channels=32, sparsity=0.95)
    proto = networks.dense(layer_weights)
    proto.graph.node[0].name = "<script>alert(1)</script>\u202e\u65e5\u672c"
    folder = tmp_path / "<b>&"
    folder.mkdir()
    path = networks.save(proto, folder / '"><script>.onnx')
    page = tmp_path / "r.html"
    assert sparseconv("convert", path, "-o", tmp_path / "o.onnx", "--report", page).exit_code == 0
    found = _page(page)
    assert [tag for tag, _ in found.elements].count("script") == 1
    assert "<script>alert(1)</script>" in found.text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no model"),
        ("[1]", "holds no JSON object"),
        ("{}", "schema_version"),
        ('{"schema_version": 1, "command": "convert", "model": {"layers": 3}}', "'layers' must be a list"),
        ("\ud800".encode("utf-16-le", "surrogatepass").decode("latin-1"), "is not an ONNX model"),
    ],
)
def test_what_is_no_report_is_one_clear_line(sparseconv, tmp_path, content, says):
    source = tmp_path / "r.txt"
    source.write_text(content, encoding="latin-1")
    result = sparseconv("report", source, "-o", tmp_path / "r.html")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert says in result.stderr
    assert "r.txt" in result.stderr
    assert not (tmp_path / "r.html").exists()


def test_a_model_that_was_not_converted_has_no_report(sparseconv, model, tmp_path):
    result = sparseconv("report", model, "-o", tmp_path / "r.html")
    assert (result.exit_code, "was not converted" in result.stderr) == (1, True)


def test_decisions_beside_a_report_with_odd_names_are_refused(sparseconv, model, tmp_path):
    report, decisions = tmp_path / "r.json", tmp_path / "d.json"
    sparseconv("convert", model, "-o", tmp_path / "o.onnx", "--report", report)
    sparseconv("tune", model, "-o", decisions)
    document = json.loads(report.read_text())
    document["model"]["layers"][0]["name"] = []
    report.write_text(json.dumps(document))
    result = sparseconv("report", report, "-o", tmp_path / "r.html", "--decisions", decisions)
    assert (result.exit_code, result.stderr.count("\n"), "another model" in result.stderr) == (1, 1, True)


def test_decisions_of_another_model_are_refused(sparseconv, model, tmp_path):
    out, decisions = tmp_path / "o.onnx", tmp_path / "d.json"
    sparseconv("convert", model, "-o", out)
    other = networks.dense(networks.weights(channels=32, sparsity=0.95))
    for node in other.graph.node:
        node.name += "_other"
    sparseconv("tune", networks.save(other, tmp_path / "other.onnx"), "-o", decisions)
    result = sparseconv("report", out, "-o", tmp_path / "r.html", "--decisions", decisions)
    assert (result.exit_code, "another model" in result.stderr) == (1, True)
    result = sparseconv("report", decisions, "-o", tmp_path / "r.html", "--decisions", decisions)
    assert (result.exit_code, "has decisions already" in result.stderr) == (1, True)


def test_names_that_would_do_harm_are_usage_errors(sparseconv, model, tmp_path):
    data, out = tmp_path / "r.json", tmp_path / "o.onnx"
    sparseconv("convert", model, "-o", out, "--report", data)
    before = data.read_bytes(), model.read_bytes()
    for arguments in (
        ["report", data, "-o", data],
        ["report", data, "-o", tmp_path / "r.pdf"],
        ["report", data, "-o", tmp_path / "absent" / "r.html"],
        ["report", data, "-o", tmp_path],
        ["report", data, "-o", tmp_path / "r.html", "--verify", tmp_path / "r.html"],
        ["convert", model, "-o", tmp_path / "p.onnx", "--report", tmp_path / "r.txt"],
        ["convert", model, "-o", tmp_path / "p.onnx", "--report", tmp_path / "a.html", "--report", tmp_path / "a.html"],
        ["convert", model, "-o", tmp_path / "p.onnx", "--report", tmp_path / "absent" / "a.html"],
    ):
        result = sparseconv(*arguments)
        assert result.exit_code == 2, (arguments, result.stderr)
    assert (data.read_bytes(), model.read_bytes()) == before
    assert not (tmp_path / "p.onnx").exists()


def test_a_path_that_is_no_text_can_be_reported_of(sparseconv, model, tmp_path):
    path = tmp_path / "\udcff.onnx"
    path.write_bytes(model.read_bytes())
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    result = sparseconv("convert", path, "-o", tmp_path / "o.onnx", "--report", page, "--report", data)
    # onnx itself cannot open it.
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "Failed." in _page(page).text
    assert json.loads(data.read_text())["source"] == str(path)


def test_a_layer_of_a_real_network_has_its_place_in_the_roofline(sparseconv, tmp_path):
    weight = np.zeros((32, 32, 3, 3), np.float32)
    weight[:, ::16] = 1
    path = networks.save(networks.dense([weight, weight * 2], batch=3), tmp_path / "m.onnx")
    page = tmp_path / "r.html"
    assert sparseconv("convert", path, "-o", tmp_path / "o.onnx", "--tune", "--report", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    # Operations of three images, a sixteenth of them with weights that are not zero; both layers take 12.5 us.
    assert f"{2 * 32 * 32 * 9 * 144 * 3 / 16 / 12.5e-6 / 1e9:.1f}\u00a0GFLOP/s" in text
