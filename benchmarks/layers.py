"""Single layers: made into one-node models, timed dense and sparse side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, helper, numpy_helper
from suite_rows import Layer, SuiteRow, read_rows, read_suite

import onnx_sparseconv as sc
from onnx_sparseconv.runtime.timing import TimingPlan, measure, speedup

OPSET = 17
# The layers of the suites belong to those who time them.
__all__ = [
    "Layer",
    "Setting",
    "SuiteRow",
    "geometric_means",
    "make_model",
    "make_weights",
    "read_rows",
    "read_suite",
    "time_layer",
]


@dataclass(frozen=True)
class Setting:
    """How a layer is run."""

    sparsity: float
    batch: int
    threads: int
    dtype: str = "float32"


def make_weights(layer: Layer, sparsity: float, dtype: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Weight ``w`` and bias ``b``; weights are zero at random places, each with the same probability."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal(layer.weight_shape)
    weight[rng.random(layer.weight_shape) < sparsity] = 0
    return {"w": weight.astype(dtype), "b": rng.standard_normal(layer.out_channels).astype(dtype)}


def make_model(
    layer: Layer, setting: Setting, seed: int = 0, *, relu: bool = False, batch: int | str | None = None
) -> ModelProto:
    """A model of one Conv with bias, and a Relu behind it if asked for; ``batch`` replaces that of the setting."""
    dtype = np.dtype(setting.dtype)
    tensors = make_weights(layer, setting.sparsity, setting.dtype, seed)
    pads = [layer.pad] * (2 * len(layer.spatial))
    conv = helper.make_node(
        "Conv",
        ["x", "w", "b"],
        ["sum" if relu else "y"],
        "conv",
        pads=pads,
        strides=[layer.stride] * len(layer.spatial),
        group=layer.group,
    )
    element = helper.np_dtype_to_tensor_dtype(dtype)
    x_shape = (setting.batch if batch is None else batch, layer.in_channels, *layer.spatial)
    graph = helper.make_graph(
        [conv, *([helper.make_node("Relu", ["sum"], ["y"], "relu")] if relu else [])],
        "layer",
        [helper.make_tensor_value_info("x", element, x_shape)],
        [helper.make_tensor_value_info("y", element, [None] * (2 + len(layer.spatial)))],
        [numpy_helper.from_array(v, k) for k, v in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


def time_layer(layer: Layer, setting: Setting, plan: TimingPlan) -> dict[str, Any]:
    """Median times of the layer in ONNX Runtime's Conv and in SparseConv, in one process, round by round."""
    model = make_model(layer, setting)
    converted, _ = sc.convert(model, options=sc.ConvertOptions(force=True))
    assert converted is not None
    feed = {"x": _make_input((setting.batch, layer.in_channels, *layer.spatial), np.dtype(setting.dtype))}
    dense, sparse = (_session(m, setting.threads, library=lib) for m, lib in ((model, False), (converted, True)))
    wanted, got = (s.run(None, feed)[0].astype(np.float64) for s in (dense, sparse))
    samples = measure([lambda: dense.run(None, feed), lambda: sparse.run(None, feed)], plan)
    gain = speedup(*samples)
    return {
        "layer": asdict(layer),
        "setting": asdict(setting),
        "dense_us": samples[0].stats().median_us,
        "sparse_us": samples[1].stats().median_us,
        "speedup": gain.of_medians,
        "speedup_low": gain.low,
        "speedup_high": gain.high,
        "dense_gflops": layer.flops * setting.batch / samples[0].stats().median_us / 1e3,
        "max_abs_difference": float(np.abs(wanted - got).max()),
        "num_runs": samples[0].stats().num_runs,
    }


def geometric_means(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Geometric mean of the speed-ups of each setting, 3x3 and other layers apart."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        kind = "3x3" if record["layer"]["kernel"] == 3 else "other"
        groups.setdefault((kind, *record["setting"].values()), []).append(record["speedup"])
    for (kind, *setting), values in groups.items():
        keys = ("sparsity", "batch", "threads", "dtype")
        mean = geometric_mean(values)
        yield {"kernel": kind, **dict(zip(keys, setting, strict=True)), "speedup": mean, "num_layers": len(values)}


def _make_input(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Random values that begin at a cache line, as ONNX Runtime places what one layer hands to the next."""
    room = np.empty(int(np.prod(shape)) * dtype.itemsize + 64, np.uint8)
    x = room[-room.ctypes.data % 64 :][: room.size - 64].view(dtype).reshape(shape)
    x[:] = np.random.default_rng(1).standard_normal(shape)
    return x


def _session(model: ModelProto, threads: int, *, library: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # The idle threads of one session must not take the cores of the other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return sc.make_session(model, threads=threads, use_library=library, session_options=options)
