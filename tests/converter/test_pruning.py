"""One-shot pruning: exact counts, nothing pruned that should not be."""

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_sparseconv.converter import prune
from onnx_sparseconv.converter.pruning import SCOPES, prune_weights
from onnx_sparseconv.errors import ModelError, UsageError
from tests.support.odd_models import FEEDS, conv, model, pruned, tensor, value
from tests.support.plain_ort import inputs_for, run

DENSE = ("initializer", "initializer-typed-fields", "float16", "float16-typed-fields", "constant", "outer-if")
COMPUTED = ("chain", "transpose", "masked", "constant-sparse-flat", "constant-floats", "sparse-initializer")


def weights(count=3, dtype=np.float32):
    rng = np.random.default_rng(0)
    scales = (1, 10, 0.1)
    return [(rng.standard_normal((8, 4 + i, 3, 3)) * scales[i]).astype(dtype) for i in range(count)]


def zeros(weight):
    return np.count_nonzero(weight == 0)


@pytest.mark.parametrize("sparsity", [0.001, 0.1, 0.333, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_counts_are_exact_in_every_scope(sparsity, dtype):
    dense = weights(dtype=dtype)
    for weight, after in zip(dense, prune_weights(dense, sparsity, "layer"), strict=True):
        assert zeros(after) == round(sparsity * weight.size)
    for weight, after in zip(dense, prune_weights(dense, sparsity, "channel"), strict=True):
        per_row = weight[0].size
        assert {zeros(row) for row in after} == {round(sparsity * per_row)}
    total = sum(w.size for w in dense)
    assert sum(map(zeros, prune_weights(dense, sparsity, "global"))) == round(sparsity * total)


@pytest.mark.parametrize("scope", SCOPES)
def test_the_smallest_go_and_the_rest_stay(scope):
    dense = weights()
    copies = [w.copy() for w in dense]
    for weight, after in zip(dense, prune_weights(dense, 0.7, scope), strict=True):
        assert after.dtype == weight.dtype
        kept = after != 0
        np.testing.assert_array_equal(after[kept], weight[kept])
        assert not np.signbit(after[~kept]).any()
        if scope == "layer":
            assert np.abs(weight[kept]).min() >= np.abs(weight[~kept]).max()
    for weight, copy in zip(dense, copies, strict=True):
        np.testing.assert_array_equal(weight, copy)


def test_global_takes_more_from_layers_with_small_weights():
    after = prune_weights(weights(), 0.6, "global")
    assert zeros(after[2]) / after[2].size > 0.95
    assert zeros(after[1]) / after[1].size < 0.2


@pytest.mark.parametrize("scope", SCOPES)
def test_ties_are_broken_the_same_way_each_time(scope):
    same = [np.ones((4, 4, 2, 2), np.float32)] * 2
    first, second = (prune_weights(same, 0.5, scope) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    if scope == "layer":
        assert not first[0].ravel()[:32].any()
        assert first[0].ravel()[32:].all()


@pytest.mark.parametrize("scope", SCOPES)
def test_nan_and_infinity_count_as_largest(scope):
    weight = np.asarray([np.nan, 1, np.inf, -2, 3, -np.inf, 0.5, -0.0], np.float32).reshape(1, 2, 2, 2)
    (after,) = prune_weights([weight], 0.5, scope)
    assert np.isnan(after.ravel()[0])
    np.testing.assert_array_equal(after.ravel()[1:], [0, np.inf, 0, 3, -np.inf, 0, 0])


@pytest.mark.parametrize("name", [*DENSE, *COMPUTED])
@pytest.mark.parametrize("scope", SCOPES)
def test_models_are_pruned_however_the_weight_is_fed(name, scope):
    proto = FEEDS[name].build()
    before = proto.SerializeToString()
    report = prune(proto, None, sparsity=0.95, scope=scope)
    assert proto.SerializeToString() != before
    onnx.checker.check_model(proto, full_check=True)
    assert report.sparsity_after == pytest.approx(0.95, abs=0.005)
    assert report.sparsity_before == pytest.approx(0.9, abs=0.001)
    run(proto, inputs_for(proto) | {"C": np.asarray(True)})
    again = prune(proto, None, sparsity=0.95, scope=scope)
    assert again.sparsity_before == report.sparsity_after == again.sparsity_after


def test_a_shared_weight_is_pruned_once():
    proto = FEEDS["shared-convs"].build()
    report = prune(proto, None, sparsity=0.95)
    assert len(report.layers) == 2
    (weight,) = proto.graph.initializer
    assert zeros(onnx.numpy_helper.to_array(weight)) == round(0.95 * 1152)


def test_what_is_left_alone_says_why():
    nodes = [
        conv(out="a", name="pruned"),
        conv("D", "b", name="depthwise", group=16),
        conv("Q", "c", name="quantised"),
        conv("R", "d", name="runtime"),
    ]
    dequantise = helper.make_node("DequantizeLinear", ["q", "s"], ["Q"])
    initializers = [tensor(pruned(), "W"), tensor(pruned((16, 1, 3, 3), 0), "D"), tensor(0.1, "s", np.float32)]
    initializers.append(tensor(np.ones((8, 16, 3, 3)), "q", np.int8))
    proto = model(
        [dequantise, *nodes],
        initializers,
        [value("X", (2, 16, 6, 6)), value("R", (8, 16, 3, 3))],
        [value(n, list("ijkl")) for n in "abcd"],
    )
    report = prune(proto, None, sparsity=0.95)
    skipped = {layer.name: layer.skipped for layer in report.layers}
    assert skipped["pruned"] == ""
    for name, word in {"depthwise": "depthwise", "quantised": "quantised", "runtime": "run time"}.items():
        assert word in skipped[name]
    by_name = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert by_name["D"].all()
    assert by_name["q"].all()


def test_nothing_to_prune_is_an_error():
    with pytest.raises(ModelError, match="no Conv weight"):
        prune(FEEDS["runtime-input"].build(), None, sparsity=0.5)


@pytest.mark.parametrize("sparsity", [0, -0.5, 1.5, float("nan")])
def test_a_sparsity_out_of_range_is_a_usage_error(sparsity):
    with pytest.raises(UsageError):
        prune(FEEDS["initializer"].build(), None, sparsity=sparsity)


def test_wrong_arguments_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="scope"):
        prune(FEEDS["initializer"].build(), None, sparsity=0.5, scope="row")
    with pytest.raises(UsageError, match="output"):
        prune(tmp_path / "model.onnx", None, sparsity=0.5)


def test_a_model_in_memory_is_only_changed_without_an_output(tmp_path):
    proto = FEEDS["initializer"].build()
    before = proto.SerializeToString()
    report = prune(proto, tmp_path / "out.onnx", sparsity=0.95)
    assert proto.SerializeToString() == before
    assert report.output == tmp_path / "out.onnx"
    written = onnx.load(tmp_path / "out.onnx")
    assert zeros(onnx.numpy_helper.to_array(written.graph.initializer[0])) == round(0.95 * 1152)


def test_the_report_says_that_accuracy_needs_retraining():
    report = prune(FEEDS["initializer"].build(), None, sparsity=0.95)
    assert any("retrain" in note for note in report.notes)
