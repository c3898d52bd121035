"""What the kernels of a layer do that ``network_kernels.py`` timed inside a network."""

from __future__ import annotations

import math
import re
from typing import Any

_BIAS, _ACTIVATION = re.compile(r"op_generic_tensor"), re.compile(r"_UnaryElementWise|_Clip")


def parts_of(layer: dict[str, Any]) -> tuple[float, float, float, float]:
    """Microseconds of the product, the bias and the activation, dense, and of the sparse layer."""
    kernels = layer["dense"]["kernels"]
    bias_us, activation_us = (
        math.fsum(kernel["us"] for kernel in kernels if kind.search(kernel["name"])) for kind in (_BIAS, _ACTIVATION)
    )
    return layer["dense"]["us"] - bias_us - activation_us, bias_us, activation_us, layer["sparse_us"]
