"""Real models, pruned where they are dense: right with the library and without, small, and back again."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from onnx_sparseconv.converter import ConvertOptions, convert, prune, restore
from onnx_sparseconv.converter.report import ConversionReport
from onnx_sparseconv.custom_ops.library import register
from onnx_sparseconv.custom_ops.schema import OP_TYPES
from onnx_sparseconv.kernels.unified_csr import order_rows, stored_entries
from onnx_sparseconv.runtime.depth import depth_of_comparison, load_structure
from onnx_sparseconv.runtime.metrics import compare_outputs, derive_tolerance
from tests.support.real_models import REAL_MODELS, RealModel, find_model, models_directory


@pytest.fixture(params=REAL_MODELS.values(), ids=list(REAL_MODELS))
def real(request: pytest.FixtureRequest) -> RealModel:
    return request.param


@pytest.fixture
def sparse_file(real: RealModel, tmp_path: Path) -> Path:
    """The model with sparse weights: as published, or pruned to 90%."""
    source = find_model(real.name)
    target = tmp_path / "sparse.onnx"
    if real.really_pruned:
        shutil.copy(source, target)
    else:
        prune(source, target, sparsity=0.9)
    return target


def run(path: Path, feed: dict[str, np.ndarray], *, library: bool) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 2
    if library:
        register(options)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feed)


def assert_equal_within(got: list[np.ndarray], wanted: list[np.ndarray], tolerance: float) -> None:
    for a, b in zip(got, wanted, strict=True):
        scale = max(1.0, float(np.abs(b).max()))
        assert np.isfinite(b).all()
        assert float(np.abs(a - b).max()) <= tolerance * scale


def test_forced_conversion_gives_the_same_results_everywhere(
    real: RealModel, sparse_file: Path, tmp_path: Path
) -> None:
    converted, back = tmp_path / "converted.onnx", tmp_path / "back.onnx"
    _, report = convert(sparse_file, converted, ConvertOptions(force=True))
    assert report.model.num_rewritten == len(report.model.layers) == real.convs
    nodes = [n.op_type for n in onnx.load(str(converted)).graph.node]
    assert "Conv" not in nodes
    assert sum(map(nodes.count, OP_TYPES)) == real.convs + len(_scales(report))
    feed = real.feed()
    wanted = run(sparse_file, feed, library=False)
    # Networks of up to 91 layers in float: a few hundred times the unit roundoff of the largest output.
    assert_equal_within(run(converted, feed, library=True), wanted, 1e-4)
    assert_equal_within(run(converted, feed, library=False), wanted, 1e-5)
    restore(converted, back)
    assert_equal_within(run(back, feed, library=False), wanted, 1e-5)


def test_restored_weights_have_the_bits_of_the_pruned_ones(sparse_file: Path, tmp_path: Path) -> None:
    converted, back = tmp_path / "converted.onnx", tmp_path / "back.onnx"
    _, report = convert(sparse_file, converted, ConvertOptions(force=True))
    restore(converted, back)
    before, after = _conv_weights(sparse_file), _conv_weights(back)
    assert before.keys() == after.keys() - _scales(report)
    scaled = _scaled(report)
    assert len(scaled) < len(before)
    for name, weight in before.items():
        if name in scaled:
            np.testing.assert_array_equal(weight == 0, after[name] == 0)
        else:
            assert (weight.shape, weight.tobytes()) == (after[name].shape, after[name].tobytes())


def _scaled(report: ConversionReport) -> set[str]:
    """Convolutions into which something was folded that may scale their weights."""
    folds = [p for p in report.passes if p.name.startswith("FoldScale")]
    return {note.node for p in folds for note in p.done if not note.text.startswith(("Add", "Sub"))}


def _scales(report: ConversionReport) -> set[str]:
    """Depthwise convolutions that stand for what scaled channels."""
    return {note.node for p in report.passes if p.name == "FuseScale" for note in p.done}


def _conv_weights(path: Path) -> dict[str, np.ndarray]:
    from onnx_sparseconv.converter.conv_sites import find_conv_sites
    from onnx_sparseconv.converter.model_io import load
    from onnx_sparseconv.converter.model_view import ModelView
    from onnx_sparseconv.converter.shapes import ShapeMap

    proto = load(path).proto
    sites = find_conv_sites(ModelView(proto), ShapeMap(proto))
    return {s.name: s.weight.values for s in sites if s.weight is not None}


@pytest.mark.parametrize("scope", ["layer", "channel"])
def test_a_model_pruned_to_90_percent_stores_at_most_a_quarter(real: RealModel, scope: str, tmp_path: Path) -> None:
    pruned, converted = tmp_path / "pruned.onnx", tmp_path / "converted.onnx"
    prune(find_model(real.name), pruned, sparsity=0.9, scope=scope)
    _, report = convert(pruned, converted, ConvertOptions(min_sparsity=0.75))
    if not report.converted:
        # One has no layer that is large enough, the weights of the other are inputs, which callers may override.
        assert real.name in ("mnist_cntk_samepad", "ultraface_rfb_320")
        return
    assert report.conv_bytes_after <= 0.25 * report.conv_bytes_before
    assert converted.stat().st_size == report.bytes_after
    saved = report.conv_bytes_before - report.conv_bytes_after
    # The portable bodies, attributes and metadata cost a few KB and a few hundred bytes a node.
    assert report.bytes_before - report.bytes_after >= saved - 16_384 - 2_048 * report.model.num_rewritten


def test_filling_rows_costs_less_than_30_percent_on_really_pruned_models(real: RealModel) -> None:
    if not real.really_pruned:
        pytest.skip("not a really pruned model")
    _, report = convert(find_model(real.name), options=ConvertOptions(min_sparsity=0.5))
    stored = [(layer.padding * layer.nonzeros, layer.nonzeros) for layer in report.model.layers if layer.padding]
    assert sum(s for s, _ in stored) / sum(n for _, n in stored) < 1.3
    assert all(s / n < 1.3 for s, n in stored)


def test_one_length_for_all_rows_would_cost_more() -> None:
    """The reason for slices: on a really pruned layer, the longest row has far more entries than the mean."""
    path = find_model("squeezenet_deep_compression")
    single = total = 0
    for weight in _conv_weights(path).values():
        lengths = (weight != 0).reshape(weight.shape[0], -1).sum(axis=1)
        single += stored_entries(lengths, np.arange(lengths.size, dtype=np.int32), lengths.size)
        total += int(lengths.sum())
        assert stored_entries(lengths, order_rows(lengths), 8) <= single
    assert single / total > 1.2


@pytest.mark.parametrize("name", ["lenet5_dns_sparse", "lenet5_dns_dense_twin", "mnist_cntk_samepad"])
def test_mnist_accuracy_is_kept_to_the_digit(name: str, tmp_path: Path) -> None:
    directory = models_directory()
    data = directory.parent / "data" / "mnist_test_2000.npz" if directory else None
    if data is None or not data.is_file():
        pytest.skip("the MNIST images are not to be had here")
    path = find_model(name)
    converted = tmp_path / "converted.onnx"
    convert(path, converted, ConvertOptions(force=True))
    with np.load(data) as mnist:
        images, labels = mnist["images"][:, None].astype(np.float32), mnist["labels"]
    images /= 1 if "cntk" in name else 256
    before, after = (_predict(p, images, library=p == converted) for p in (path, converted))
    accuracy = float((before == labels).mean())
    assert accuracy > 0.97
    assert float((after == labels).mean()) == accuracy
    assert (before == after).all()


def _predict(path: Path, images: np.ndarray, *, library: bool) -> np.ndarray:
    options = ort.SessionOptions()
    if library:
        register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (feed,) = session.get_inputs()
    step = 1 if feed.shape[0] == 1 else 500
    batches = [images[i : i + step] for i in range(0, len(images), step)]
    return np.concatenate([session.run(None, {feed.name: b})[0].argmax(axis=1) for b in batches])


def test_in_float16_every_model_stays_close_everywhere(real: RealModel, sparse_file: Path, tmp_path: Path) -> None:
    converted, back = tmp_path / "converted.onnx", tmp_path / "back.onnx"
    _, report = convert(sparse_file, converted, ConvertOptions(force=True, precision="fp16"))
    assert report.precision is not None
    assert report.precision.half_nodes >= real.convs // 2  # what was fused into the layers counts no more
    assert _sparse_types(converted) == {TensorProto.FLOAT16}
    restore(converted, back)
    feed = real.feed()
    wanted = run(sparse_file, feed, library=False)
    tolerance = derive_tolerance(depth_of_comparison(load_structure(sparse_file), load_structure(converted)))
    assert tolerance.derived_from.storage == "float16"
    for path, library in ((converted, True), (converted, False), (back, False)):
        for got, expected in zip(run(path, feed, library=library), wanted, strict=True):
            comparison = compare_outputs("output", expected, got, tolerance)
            assert comparison.passed, (comparison.reason, comparison.errors, comparison.atol)


def _sparse_types(path: Path) -> set[int]:
    nodes = onnx.load(str(path)).graph.node
    return {a.i for n in nodes if n.op_type.startswith("SparseConv") for a in n.attribute if a.name == "element_type"}
