"""Single layers: read from a suite, made into one-node models, timed dense and sparse side by side."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, helper, numpy_helper

import onnx_sparseconv as sc
from onnx_sparseconv.runtime.timing import TimingPlan, measure, speedup

SUITES = Path(__file__).parent / "suites"
OPSET = 17


@dataclass(frozen=True)
class Layer:
    """A Conv layer; ``height`` 1 stands for a 1-D convolution over ``width``."""

    name: str
    in_channels: int
    out_channels: int
    height: int
    width: int
    kernel: int
    stride: int
    pad: int
    group: int

    @property
    def spatial(self) -> tuple[int, ...]:
        """Sizes of the input's spatial axes."""
        return (self.width,) if self.height == 1 else (self.height, self.width)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """``(K, C / group, D1..Dn)``."""
        return (self.out_channels, self.in_channels // self.group, *(self.kernel for _ in self.spatial))

    @property
    def out_sizes(self) -> tuple[int, ...]:
        """Sizes of the output's spatial axes."""
        return tuple((s + 2 * self.pad - self.kernel) // self.stride + 1 for s in self.spatial)

    @property
    def flops(self) -> int:
        """Dense operations for one image, 2 a multiply-add."""
        return int(2 * np.prod(self.out_sizes) * np.prod(self.weight_shape))


@dataclass(frozen=True)
class Setting:
    """How a layer is run."""

    sparsity: float
    batch: int
    threads: int
    dtype: str = "float32"


@dataclass(frozen=True)
class SuiteRow:
    """A layer of a suite, with the settings that the suite asks for; empty where it leaves them to the caller."""

    layer: Layer
    sparsities: tuple[float, ...] = ()
    batches: tuple[int, ...] = ()


def read_rows(name: str) -> list[SuiteRow]:
    """The rows of a suite; lines that start with # are remarks."""
    with (SUITES / f"{name}.csv").open(newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [_row(row) for row in rows]


def _row(row: dict[str, str]) -> SuiteRow:
    sparsities = tuple(float(word) for word in row.pop("sparsities", "").split())
    batches = tuple(int(word) for word in row.pop("batches", "").split())
    return SuiteRow(Layer(row.pop("name"), **{k: int(v) for k, v in row.items()}), sparsities, batches)


def read_suite(name: str) -> list[Layer]:
    """The layers of a suite."""
    return [row.layer for row in read_rows(name)]


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
