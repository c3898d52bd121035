from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from onnx_sparseconv.report import read_report
from onnx_sparseconv.report.charts import gain_chart, layer_times_chart, roofline_chart, speedup_chart
from onnx_sparseconv.report.charts.layer_times import MAX_LAYERS
from onnx_sparseconv.report.charts.roofline import place_of
from onnx_sparseconv.report.data import Case, Layer, LayerTime, Peaks
from tests.report import documents

PEAKS = Peaks(2e11, 4e10, "measured with great care")


def _layer(name="conv", *, dense_us=200.0, sparse_us=100.0, **more):
    facts = {
        "is_sparse": True,
        "sparsity": 0.9,
        "nonzeros": 10,
        "num_weights": 100,
        "flops": 1_000_000,
        "dtype": "float32",
        "input_shape": (None, 4, 10, 10),
        "output_shape": (None, 8, 10, 10),
        "dense_bytes": 400,
        "sparse_bytes": 80,
        "times": (LayerTime(dense_us, sparse_us),),
    }
    return Layer(name, **{**facts, **more})


def _svg(chart):
    assert chart.missing == ""
    return ET.fromstring(chart.svg)


def _all(svg, tag, class_):
    return [element for element in svg.iter(tag) if element.get("class") == class_]


def _charts(layers, case=Case(batch=1, dense_us=1000, converted_us=400)):  # noqa: B008
    return [
        layer_times_chart(layers, 0, "a"),
        speedup_chart(layers, 0, "b"),
        roofline_chart(layers, 0, case, PEAKS, "c"),
        gain_chart(layers, 0, case, "d"),
    ]


@pytest.mark.parametrize("number", [1, 2, 500])
def test_every_mark_lies_in_the_picture_and_every_picture_has_a_title(number):
    report = read_report(documents.many(number))
    for chart in _charts(report.layers, report.cases[0]):
        svg = _svg(chart)
        _, _, width, height = map(float, svg.get("viewBox").split())
        for element in svg.iter():
            for name, most in (
                ("x", width),
                ("cx", width),
                ("x2", width),
                ("y", height),
                ("cy", height),
                ("y2", height),
            ):
                if element.get(name) is not None:
                    assert -1 <= float(element.get(name)) <= most + 1, ET.tostring(element)
        titles = [element.text for element in svg if element.tag in ("title", "desc")]
        assert len(titles) == 2
        assert all(titles)
        assert svg.get("role") == "img"


def test_bars_are_as_long_as_the_times():
    layers = [_layer("short", dense_us=50.0, sparse_us=25.0), _layer("long", is_sparse=False)]
    svg = _svg(layer_times_chart(layers, 0, "a"))
    names = [element.text for element in _all(svg, "text", "layer")]
    assert names == ["long", "short"]
    dense, sparse_left = _all(svg, "rect", "bar-dense"), _all(svg, "rect", "bar-sparse left")
    assert float(dense[0].get("width")) == pytest.approx(2 * float(sparse_left[0].get("width")), rel=0.01)
    chosen, dense_left = _all(svg, "rect", "bar-sparse"), _all(svg, "rect", "bar-dense left")
    assert float(chosen[0].get("width")) == pytest.approx(float(dense[0].get("width")) / 8, rel=0.01)
    assert float(dense_left[0].get("width")) == pytest.approx(float(dense[0].get("width")) / 4, rel=0.01)


def test_of_many_layers_the_longest_are_shown_and_that_is_said():
    chart = layer_times_chart([_layer(f"c{n}", dense_us=1.0 + n) for n in range(100)], 0, "a")
    names = [element.text for element in _all(_svg(chart), "text", "layer")]
    assert names == [f"c{99 - n}" for n in range(MAX_LAYERS)]
    assert f"The {MAX_LAYERS} of 100 timed layers" in chart.caption


def test_above_the_line_is_faster():
    layers = [_layer("fast", sparse_us=50.0), _layer("slow", sparse_us=400.0, is_sparse=False, sparsity=0.5)]
    svg = _svg(speedup_chart(layers, 0, "a"))
    (line,) = _all(svg, "line", "even")
    (fast,), (slow,) = _all(svg, "circle", "mark-sparse"), _all(svg, "rect", "mark-dense")
    assert float(fast.get("cy")) < float(line.get("y1")) < float(slow.get("y"))
    assert float(slow.get("x")) < float(fast.get("cx"))
    assert "4.00" in fast.find("title").text


def test_the_place_in_the_roofline_is_work_by_bytes_and_time():
    dense = place_of(_layer(is_sparse=False, dtype="float32"), 0, 2)
    moved = 4 * 2 * (400 + 800) + 400
    assert dense.intensity == pytest.approx(2e6 / moved)
    assert dense.flops_per_s == pytest.approx(2e6 / 200e-6)
    sparse = place_of(_layer(input_shape=(2, 4, 10, 10)), 0, None)
    assert sparse.intensity == pytest.approx(2e5 / (moved - 400 + 80))
    assert sparse.flops_per_s == pytest.approx(2e5 / 100e-6)


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": "float16"},
        {"input_shape": None},
        {"input_shape": (None, 4, None, 10)},
        {"output_shape": (None, 4, None, 10)},
        {"flops": None},
        {"flops": 0},
        {"sparse_bytes": None},
        {"nonzeros": None},
        {"sparse_us": None},
        {"times": ()},
    ],
)
def test_what_is_not_known_is_not_placed(more):
    assert place_of(_layer(**more), 0, 1) is None


def test_a_batch_that_is_not_known_is_not_guessed():
    assert place_of(_layer(), 0, None) is None


def test_the_roof_bends_where_both_bounds_are_equal():
    chart = roofline_chart([_layer()], 0, Case(batch=1), PEAKS, "a")
    svg = _svg(chart)
    (roof,) = _all(svg, "path", "roof")
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", roof.get("d")) if point]
    assert points[1][1] == points[2][1] < points[0][1]
    assert "measured with great care" in chart.caption
    left = roofline_chart([_layer(), _layer(flops=None)], 0, Case(batch=1), PEAKS, "a")
    assert "1 timed layer whose shapes are not known" in left.caption


def test_layers_above_the_peak_are_pointed_out():
    fast = _layer(flops=10**9)
    chart = roofline_chart([_layer(), fast], 0, Case(batch=1), PEAKS, "a")
    assert "1 layer lies above the peak" in chart.caption
    assert "above the peak" not in roofline_chart([_layer()], 0, Case(batch=1), PEAKS, "a").caption


def test_without_peaks_there_is_no_roofline_but_a_reason():
    chart = roofline_chart([_layer()], 0, Case(batch=1), None, "a")
    assert (chart.svg, "was not recorded" in chart.missing) == ("", True)
    assert "no timed layer is known" in roofline_chart([_layer(flops=None)], 0, Case(batch=1), PEAKS, "a").missing


def test_gains_are_added_up_from_the_largest_on():
    layers = [_layer("small", dense_us=110.0), _layer("large"), _layer("dense", is_sparse=False)]
    svg = _svg(gain_chart(layers, 0, Case(dense_us=300, converted_us=200), "a"))
    assert "2 sparse layers save 110" in svg.find("desc").text
    points = _all(svg, "circle", "mark-sparse")
    assert [point.find("title").text.split(":")[0] for point in points] == ["large", "small"]
    (whole,) = _all(svg, "line", "even")
    assert float(points[0].get("cy")) == pytest.approx(float(whole.get("y1")))
    assert float(points[1].get("cy")) < float(points[0].get("cy"))


def test_a_loss_lies_below_zero():
    svg = _svg(gain_chart([_layer(sparse_us=300.0)], 0, Case(dense_us=300, converted_us=500), "a"))
    assert any(element.text.startswith("\u2212") for element in svg.iter("text"))


def test_charts_without_anything_to_show_say_why():
    for chart in _charts([_layer(times=())]):
        assert chart.svg == ""
        assert chart.missing.endswith(".")
