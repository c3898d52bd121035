"""The layers of the suites: read, and named. Needs nothing but numpy: figures can be made where nothing can run."""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SUITES = Path(__file__).parent / "suites"


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


def canonical(layer: Layer) -> Layer:
    """The layer under a name that says what it is, the same for equal layers: ``3x3_64-128@112``, ``1d2_300-100@56p0``.

    Stride, padding and groups are told where they are not 1, half the kernel, and 1.
    """
    kind = f"1d{layer.kernel}" if layer.height == 1 else f"{layer.kernel}x{layer.kernel}"
    size = str(layer.width) if layer.height in (1, layer.width) else f"{layer.height}x{layer.width}"
    extras = [
        f"s{layer.stride}" if layer.stride != 1 else "",
        f"p{layer.pad}" if layer.pad != layer.kernel // 2 else "",
        f"g{layer.group}" if layer.group != 1 else "",
    ]
    name = f"{kind}_{layer.in_channels}-{layer.out_channels}@{size}{''.join(extras)}"
    return dataclasses.replace(layer, name=name)
