"""Layers that were timed inside networks (``network_kernels.py``), and the `NetworkModel` that foretells them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from network_parts import DENSE_ACTIVATION, SPARSE_BEFORE, SPARSE_BEHIND, parts_of

from onnx_sparseconv.kernels.gpu_network_times import CodeWork, NetworkModel, code_work
from onnx_sparseconv.kernels.gpu_times import FLAT, GEMM, DenseWork, TimeModel, as_arrays, dense_work, fastest_work
from onnx_sparseconv.kernels.layer import SparseLayer, make_layer
from onnx_sparseconv.kernels.plan import GeneratedPlan, choose_plan

# Where the search begins: what is plausible for an H200.
START = NetworkModel(
    tflops=450.0,
    half_depth=300.0,
    half_moutputs=0.5,
    bandwidth_tb=3.0,
    depthwise_tb=3.0,
    product_launch_us=2.0,
    window_us=1.0,
    pass_launch_us=1.0,
    bias_us=3.0,
    activation_us=2.0,
    slow_activation_us=2.0,
    code_launch_us=2.0,
    code_slowdown=1.0,
    code_size_us=0.0,
    code_in_us=0.0,
    code_out_us=0.0,
)
PRODUCT = ("tflops", "half_depth", "half_moutputs", "bandwidth_tb", "product_launch_us", "window_us")

# Searches a model for what makes errors, as logarithms, least: where it begins, the constants that change, the errors.
Fit = Callable[[Any, Sequence[str], Callable[[Any], np.ndarray]], Any]


@dataclass(frozen=True)
class NetworkRows:
    """Distinct layers of the networks, one an element; those that are alike count once, with the median of their times.

    Attributes:
        names: of the layers' forms.
        dense, code: what they have to do.
        is_depthwise, adds_residual, is_slow: of each; the last one of its activation.
        product_us, bias_us, activation_us: what dense ones took; 0 for a pass that there is not.
        code_us: what the generated kernel took; NaN where it was not measured.
    """

    names: tuple[str, ...]
    dense: DenseWork
    code: CodeWork
    is_depthwise: np.ndarray
    adds_residual: np.ndarray
    is_slow: np.ndarray
    product_us: np.ndarray
    bias_us: np.ndarray
    activation_us: np.ndarray
    code_us: np.ndarray


def read_network_rows(path: Path, dtype: str, architecture: int, clock_mhz: float) -> NetworkRows:
    """The rows of a results file, of one type, that a plan of today would run.

    Raises:
        ValueError: there is none.
    """
    found = []
    by_code, by_library = (_alike(path, dtype, kernels) for kernels in ("generated", "library"))
    for key in dict.fromkeys((*by_code, *by_library)):
        name, adds_residual, batch, activation = key
        layers, coded = by_code.get(key, []) + by_library.get(key, []), by_code.get(key, [])
        made = _make_layer(layers[0]["dense"])
        plan = choose_plan(made, architecture)
        if not isinstance(plan, GeneratedPlan):
            continue
        *times, _ = np.median([parts_of(layer) for layer in layers], axis=0).tolist()
        took_us = [layer["sparse_us"] for layer in coded if _is_code(layer)]
        times.append(float(np.median(took_us)) if took_us else math.nan)
        works = dense_work(made, batch), code_work(made, plan, batch, clock_mhz)
        found.append((name, *works, made.is_depthwise, adds_residual, activation == "clip", *times))
    if not found:
        raise ValueError(f"{path.name}: no layer that generated code would run")
    names, dense, code, *others = zip(*found, strict=True)
    works = DenseWork(**as_arrays(list(dense))), CodeWork(**as_arrays(list(code)))
    return NetworkRows(names, *works, *map(np.array, others))


@dataclass(frozen=True)
class LibraryTimes:
    """Layers that the library's kernels ran inside networks, likewise.

    Attributes:
        kernels: that ran them; the one that multiplies, without numbers.
        foretold_us, took_us: of each.
    """

    kernels: tuple[str, ...]
    foretold_us: np.ndarray
    took_us: np.ndarray


def read_library_times(path: Path, dtype: str, architecture: int, model: TimeModel) -> LibraryTimes:
    """Of one type, those of which something is foretold, and that add no residual."""
    found = []
    for (_, adds_residual, batch, _), layers in _alike(path, dtype, "library").items():
        names = [one["name"] for one in layers[0]["sparse_kernels"]]
        # A library without the flat kernel, or those for matrix products, ran others.
        without = [kind for kind in (FLAT, GEMM) if not any(name.startswith(f"sparseconv_{kind}") for name in names)]
        made = _make_layer(layers[0]["dense"])
        work = fastest_work(made, architecture, batch, model.multiprocessors, without=without)
        if work is not None and not adds_residual:
            kernel = next(n for n in names if not SPARSE_BEFORE.match(n) and not SPARSE_BEHIND.match(n))
            name = re.match(r"sparseconv_([a-z]+)", kernel)[1]  # type: ignore[index]
            took_us = float(np.median([layer["sparse_us"] for layer in layers]))
            found.append((name, float(model.cycles_us(work)), took_us))
    kernels, foretold_us, times = zip(*found, strict=True)
    return LibraryTimes(kernels, np.array(foretold_us), np.array(times))


# Of layers that are alike: form, whether they add a residual, batch, and the activation of the dense one.
_Kind = tuple[str, bool, int, str]


def _alike(path: Path, dtype: str, kernels: str) -> dict[_Kind, list[dict[str, Any]]]:
    """The layers of a type that such kernels ran."""
    alike: dict[_Kind, list[dict[str, Any]]] = {}
    for network in json.loads(path.read_text())["networks"]:
        if network.get("kernels", "generated") == kernels:
            for layer in network["layers"]:
                if layer["dense"]["dtype"] == dtype:
                    key = _name(layer["dense"]), layer["adds_residual"], network["batch"], _activation(layer)
                    alike.setdefault(key, []).append(layer)
    return alike


def _activation(layer: dict[str, Any]) -> str:
    """What the dense layer applies; empty for nothing."""
    names = [kernel["name"] for kernel in layer["dense"]["kernels"] if DENSE_ACTIVATION.search(kernel["name"])]
    return "" if not names else "clip" if "_Clip" in names[0] else "other"


def _is_code(layer: dict[str, Any]) -> bool:
    """Whether code of its own ran it."""
    return all(re.match(r"sparseconv_(generated|reduce)", kernel["name"]) for kernel in layer["sparse_kernels"])


def fit_network(rows: NetworkRows, fit: Fit) -> NetworkModel:
    """The model that foretells the rows best."""
    is_product = ~rows.is_depthwise
    dense, dense_us = _select(rows.dense, is_product), rows.product_us[is_product]
    model = fit(START, PRODUCT, lambda m: np.log(m.product_us(dense) / dense_us))
    depthwise, depthwise_us = _select(rows.dense, rows.is_depthwise), rows.product_us[rows.is_depthwise]
    model = fit(model, ("depthwise_tb",), lambda m: np.log(m.depthwise_us(depthwise) / depthwise_us))
    return _fit_code(rows, _fit_passes(rows, model))


def network_errors(rows: NetworkRows, model: NetworkModel) -> tuple[np.ndarray, np.ndarray]:
    """Foretold over measured times of each layer, dense with its passes and by generated code without residuals."""
    passes = {"has_bias": rows.bias_us > 0, "has_activation": rows.activation_us > 0, "is_slow": rows.is_slow}
    dense_us = model.dense_us(rows.dense, is_depthwise=rows.is_depthwise, **passes)
    took_us = rows.product_us + rows.bias_us + rows.activation_us
    alone = ~rows.adds_residual & np.isfinite(rows.code_us)
    return dense_us / took_us, (model.code_us(rows.code) / rows.code_us)[alone]


def _fit_passes(rows: NetworkRows, model: NetworkModel) -> NetworkModel:
    """All kinds of passes take as long to launch."""
    columns, times = [], []
    of_clip = np.where(rows.is_slow, rows.activation_us, 0.0)
    kinds = (rows.bias_us, rows.activation_us - of_clip, of_clip)
    for column, took_us in enumerate(kinds):
        for moutputs, one in zip(np.asarray(rows.dense.moutputs), took_us, strict=True):
            if one > 0:
                columns.append([1.0, *(moutputs if column == kind else 0.0 for kind in range(len(kinds)))])
                times.append(one)
    launch_us, bias_us, activation_us, slow_activation_us = _least_squares(np.array(columns), np.array(times))
    return replace(
        model,
        pass_launch_us=launch_us,
        bias_us=bias_us,
        activation_us=activation_us,
        slow_activation_us=slow_activation_us,
    )


def _fit_code(rows: NetworkRows, model: NetworkModel) -> NetworkModel:
    """Of layers that add a residual, reading it counts apart, and is no constant of the model."""
    code, out_mb, known = rows.code, np.asarray(rows.code.out_mb), np.isfinite(rows.code_us)
    ones = np.ones(len(rows.names))
    columns = [ones, code.work_us, np.sqrt(code.code_mb), code.in_mb, out_mb, out_mb * rows.adds_residual]
    launch_us, slowdown, size_us, in_us, out_us, _ = _least_squares(
        np.stack(columns, axis=1)[known], rows.code_us[known]
    )
    return replace(
        model,
        code_launch_us=launch_us,
        code_slowdown=slowdown,
        code_size_us=size_us,
        code_in_us=in_us,
        code_out_us=out_us,
    )


def _least_squares(columns: np.ndarray, times: np.ndarray) -> list[float]:
    """Factors of the columns that make the mean square of relative errors least."""
    factors, *_ = np.linalg.lstsq(columns / times[:, None], np.ones(len(times)), rcond=None)
    return [float(factor) for factor in factors]


def _select(work: DenseWork, wanted: np.ndarray) -> DenseWork:
    return DenseWork(**{name: values[wanted] for name, values in vars(work).items()})


def _name(layer: dict[str, Any]) -> str:
    kernel, grouped = "x".join(map(str, layer["kernel"])), f"/{layer['group']}" if layer["group"] > 1 else ""
    channels = f"{layer['in_channels']}-{layer['out_channels']}"
    return f"{kernel}_{channels}{grouped}@{layer['height']}/{layer['stride']}"


def _make_layer(layer: dict[str, Any]) -> SparseLayer:
    """One that is like it: with as many zeros, in other places."""
    shape = (layer["out_channels"], layer["in_channels"] // layer["group"], *layer["kernel"])
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(shape).astype(layer["dtype"])
    weight[rng.random(shape) < layer["sparsity"]] = 0
    made = make_layer(
        weight,
        strides=(layer["stride"],) * 2,
        dilations=(1, 1),
        pads=(layer["pad"],) * 4,
        group=layer["group"],
        element_type=weight.dtype,
        activation=0,
        in_size=(layer["height"], layer["width"]),
    )
    assert isinstance(made, SparseLayer)
    return made
