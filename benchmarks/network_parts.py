"""Which kernels of a network belong to which layer, and what they do, as ``network_kernels.py`` times them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

# Kernels that multiply, and those that belong to the layer before or behind.
DENSE_PRODUCT = re.compile(r"implicit_gemm|fprop|nvjet|cutlass|conv2d|first_layer|gemm|splitK")
DENSE_BIAS = re.compile(r"op_generic_tensor")
DENSE_ACTIVATION = re.compile(r"_UnaryElementWise|_Clip")
SPARSE_BEFORE = re.compile(r"sparseconv_(interleave|gather|space_to_depth)")
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


def parts_of(layer: dict[str, Any]) -> tuple[float, float, float, float]:
    """Microseconds of the product, the bias and the activation, dense, and of the sparse layer."""
    kernels = layer["dense"]["kernels"]
    bias_us, activation_us = (
        math.fsum(kernel["us"] for kernel in kernels if kind.search(kernel["name"]))
        for kind in (DENSE_BIAS, DENSE_ACTIVATION)
    )
    return layer["dense"]["us"] - bias_us - activation_us, bias_us, activation_us, layer["sparse_us"]
