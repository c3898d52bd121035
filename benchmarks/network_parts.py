"""Which kernels of a network belong to which layer, and what they do, as ``network_kernels.py`` times them."""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnx_sparseconv.runtime.layer_times import node_events

# Kernels that multiply, and those that belong to the layer before or behind.
DENSE_PRODUCT = re.compile(r"implicit_gemm|fprop|nvjet|cutlass|conv2d|first_layer|gemm|splitK")
DENSE_BIAS = re.compile(r"op_generic_tensor")
DENSE_ACTIVATION = re.compile(r"_UnaryElementWise(?!.*OP_Cast)|_Clip")
SPARSE_BEFORE = re.compile(r"sparseconv_(interleave|flatten|gather|pack|space_to_depth)")
SPARSE_BEHIND = re.compile(r"sparseconv_reduce")
SPARSE_POOL = re.compile(r"sparseconv_max_pool")
SPARSE_PRODUCT = re.compile(r"sparseconv_")

# Name and microseconds.
Kernel = tuple[str, float]


def dense_groups(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels of each dense layer, which all have a bias, added by a kernel behind their products."""
    groups: list[list[Kernel]] = [[]]
    products: list[Kernel] = []
    for kernel in kernels:
        if DENSE_PRODUCT.search(kernel[0]):
            products.append(kernel)
        elif DENSE_BIAS.search(kernel[0]):
            groups.append([*products, kernel])
            products = []
        elif not products and DENSE_ACTIVATION.search(kernel[0]):
            groups[-1].append(kernel)
    return groups[1:]


def sparse_groups(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels of each sparse layer, without its pool."""
    groups: list[list[Kernel]] = []
    before: list[Kernel] = []
    for kernel in kernels:
        if SPARSE_BEFORE.match(kernel[0]):
            before.append(kernel)
        elif SPARSE_BEHIND.match(kernel[0]):
            groups[-1].append(kernel)
        elif SPARSE_PRODUCT.match(kernel[0]) and not SPARSE_POOL.match(kernel[0]):
            groups.append([*before, kernel])
            before = []
    return groups


def executed_convolutions(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The convolutions of one run in ONNX Runtime's profile, in their order; sparse layers have the model's names."""
    convolutions = (node for node in node_events(events) if "Conv" in node[1]["args"]["op_name"])
    return sorted(convolutions, key=lambda node: node[1]["ts"])


def sizes_of(event: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Of what a dense layer reads and makes, in any layout: ONNX Runtime changes that, and then the name is lost."""
    x, y = event["args"]["input_type_shape"][0], event["args"]["output_type_shape"][0]
    return tuple(tuple(sorted(next(iter(shape.values())))) for shape in (x, y))


def by_layer(
    layers: Sequence[Hashable], executed: Sequence[Hashable], groups: Sequence[list[Kernel]]
) -> list[list[Kernel]]:
    """The kernels of each layer. Where a network branches, layers need not run in the order of the model's nodes.

    Args:
        layers: keys of all layers. Those with one key ran in this order.
        executed: keys of what ran, in its order.
        groups: the kernels of that.

    Raises:
        ValueError: other layers ran than there are.
    """
    waiting: defaultdict[Hashable, list[list[Kernel]]] = defaultdict(list)
    for key, group in zip(executed, groups, strict=True):
        waiting[key].append(group)
    for key in layers:
        if not waiting[key]:
            raise ValueError(f"layer {key} did not run; these did: {sorted(map(str, executed))}")
    if len(layers) != len(executed):
        raise ValueError(f"{len(executed)} layers ran, not {len(layers)}")
    return [waiting[key].pop(0) for key in layers]


def parts_of(layer: dict[str, Any]) -> tuple[float, float, float, float]:
    """Microseconds of the product, the bias and the activation, dense, and of the sparse layer."""
    kernels = layer["dense"]["kernels"]
    bias_us, activation_us = (
        math.fsum(kernel["us"] for kernel in kernels if kind.search(kernel["name"]))
        for kind in (DENSE_BIAS, DENSE_ACTIVATION)
    )
    return layer["dense"]["us"] - bias_us - activation_us, bias_us, activation_us, layer["sparse_us"]
