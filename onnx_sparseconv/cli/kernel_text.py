"""Which kernels are asked for and which ran, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnx_sparseconv.cli.console import shorten
from onnx_sparseconv.cli.options import KernelChoice
from onnx_sparseconv.text import count

if TYPE_CHECKING:
    from onnx_sparseconv.runtime.kernels import KernelUse
    from onnx_sparseconv.runtime.profiling import NodePlace

_KERNEL_KEY = "sparseconv.cuda_kernel"
_MAX_NAMES = 6


def kernel_lines(kernels: Sequence[KernelUse]) -> list[str]:
    """One line a kernel, with the number of nodes that it ran."""
    counted = Counter(use.kernel for use in kernels)
    return [f"{kernel}: {count(number, 'SparseConv node')}" for kernel, number in counted.most_common()]


def kernel_config(choice: KernelChoice) -> dict[str, str]:
    """The session configuration entries that ask the native library for a kernel."""
    return {} if choice is KernelChoice.AUTO else {_KERNEL_KEY: choice.value}


def elsewhere_lines(places: Sequence[NodePlace]) -> list[str]:
    """One line an operator that ONNX Runtime ran elsewhere than asked, with the names of its first nodes."""
    by_type: dict[str, list[str]] = {}
    for place in places:
        by_type.setdefault(place.op_type, []).append(shorten(place.node))
    lines = []
    for op_type, names in by_type.items():
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        lines.append(f"{count(len(names), f'{op_type} node')}: {', '.join(names[:_MAX_NAMES])}{more}")
    return lines
