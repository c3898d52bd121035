"""A layer as a product with its lowered matrix, on a device: the steps of a plan, in terms of what a device can do.

`cupy_device.CupyDevice` is the device on a GPU; the tests have another one without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from lowering import (
    Lowering,
    LoweringPlan,
    csr_arrays,
    dense_plans,
    sparse_plans,
    weight_matrix,
)

Array = np.ndarray[Any, Any]
Address = int
# Of each plan, before the fastest is chosen: so many runs, and none once they have taken so long.
PROBING_RUNS = 3
PROBING_US = 20_000


class Runs(Protocol):
    """Something that runs on the device, on one copy of its inputs and outputs after the other."""

    def __call__(self) -> None:
        """Run once and wait."""

    def burst(self, runs: int) -> None:
        """Run several times and wait once."""


class LoweringDevice(Protocol):
    """What lowered layers need of a device. What multiplies or launches only puts work into the device's stream.

    Attributes:
        versions: of its libraries, by name.
        sparse_algorithms: numbers of the algorithms for a sparse product that are worth trying.
    """

    @property
    def versions(self) -> dict[str, str]:
        """See above."""

    @property
    def sparse_algorithms(self) -> tuple[int, ...]:
        """See above."""

    def allocate(self, size_bytes: int) -> Address:
        """Memory full of zeros, until the device is closed."""

    def upload(self, values: Array) -> Address:
        """A copy in the memory of the device, until it is closed."""

    def lower(self, x: Address, lowered: Address, images: int, strides: tuple[int, int]) -> None:
        """The kernel ``lower``; strides of an image and of a row, in elements."""

    def finish(self, product: Address, y: Address, bias: Address, images: int, strides: tuple[int, int]) -> None:
        """The kernel ``finish``; strides of an image and of an output channel, in elements."""

    def multiply(self, weight: Address, lowered: Address, product: Address, shape: Product) -> None:
        """``product[i] = weight @ lowered[i]``, all with rows that are contiguous."""

    def sparse_product(
        self, csr: Csr, lowered: Address, product: Address, columns: int, algorithm: int
    ) -> Callable[[], None]:
        """What puts ``product = csr @ lowered`` into the stream, ``[K, rows] @ [rows, columns]``."""

    def recorded(self, runs: Sequence[Callable[[], None]]) -> Runs:
        """Each function's work, as a CUDA graph if it can be one."""

    def close(self) -> None:
        """Give back what is not memory; nothing that was recorded runs any more."""


@dataclass(frozen=True)
class Product:
    """A dense product, or several of one shape.

    Attributes:
        rows: of the weight: output channels.
        depth: columns of the weight, rows of a lowered matrix.
        columns: of a lowered matrix.
        count: matrices, one behind the other.
        tf32: whether floats may be rounded to TF32 before they are multiplied.
    """

    rows: int
    depth: int
    columns: int
    count: int
    tf32: bool


@dataclass(frozen=True)
class Csr:
    """A weight in compressed rows, in the memory of the device.

    Attributes:
        rows, columns, nonzeros: its sizes.
        pointers, indices, values: addresses; int32, int32 and the layer's type.
    """

    rows: int
    columns: int
    nonzeros: int
    pointers: Address
    indices: Address
    values: Address

    @staticmethod
    def upload(device: LoweringDevice, matrix: Array) -> Csr:
        """A matrix in host memory as compressed rows on the device."""
        pointers, indices, values = csr_arrays(matrix)
        rows, columns = matrix.shape
        return Csr(rows, columns, values.size, device.upload(pointers), device.upload(indices), device.upload(values))


class LoweredLayer:
    """A layer with its weights on the device, ready to be computed by plans."""

    def __init__(
        self,
        device: LoweringDevice,
        lowering: Lowering,
        weights: Mapping[str, Array],
        batch: int,
        *,
        places: Sequence[tuple[Address, Address]],
        scratch: dict[str, Address] | None = None,
    ) -> None:
        """Upload the weights.

        Args:
            device: where it runs.
            lowering: of the layer.
            weights: ``w`` ``[K, C, ...]`` and ``b`` ``[K]``, of the type of the layer.
            batch: images.
            places: addresses of input and output of every copy, which take turns.
            scratch: addresses of scratch memory by its use, to share it with the same layer of other weights.
        """
        self._device, self._lowering, self._batch, self._places = device, lowering, batch, places
        self._dtype = weights["w"].dtype
        self._bias = device.upload(weights["b"])
        self._matrix = weight_matrix(weights["w"], lowering)
        self._scratch: dict[str, Address] = {} if scratch is None else scratch
        self._dense: Address | None = None
        self._csr: Csr | None = None

    def dense_plans(self) -> tuple[LoweringPlan, ...]:
        """Plans worth trying with a dense product."""
        return dense_plans(self._lowering, self._batch, self._dtype.itemsize)

    def sparse_plans(self, algorithms: tuple[int, ...]) -> tuple[LoweringPlan, ...]:
        """Plans worth trying with a sparse product."""
        return sparse_plans(self._lowering, self._batch, self._dtype.itemsize, algorithms)

    def dense_runs(self, plan: LoweringPlan, copies: int | None = None, *, tf32: bool = True) -> Runs:
        """The layer with a dense product, recorded for the first ``copies`` copies; None stands for all."""
        weight = self._dense = self._dense or self._device.upload(self._matrix)
        lowering = self._lowering
        images = plan.chunk if plan.layout == "batched" else 1
        columns = lowering.positions if plan.layout == "batched" else plan.chunk * lowering.positions
        shape = Product(lowering.out_channels, lowering.depth, columns, images, tf32)

        def product(lowered: Address, to: Address) -> Callable[[], None]:
            return lambda: self._device.multiply(weight, lowered, to, shape)

        return self._recorded(plan, copies, product)

    def sparse_runs(self, plan: LoweringPlan, copies: int | None = None) -> Runs:
        """The layer with a sparse product, recorded for the first ``copies`` copies; None stands for all."""
        csr = self._csr = self._csr or Csr.upload(self._device, self._matrix[:, : self._lowering.rows])
        columns = plan.chunk * self._lowering.positions

        def product(lowered: Address, to: Address) -> Callable[[], None]:
            return self._device.sparse_product(csr, lowered, to, columns, plan.algorithm)

        return self._recorded(plan, copies, product)

    def _recorded(
        self, plan: LoweringPlan, copies: int | None, product: Callable[[Address, Address], Callable[[], None]]
    ) -> Runs:
        # Everything that allocates or describes is done before the recording, which only takes launches.
        steps = [self._steps(plan, x, y, product) for x, y in self._places[:copies]]
        return self._device.recorded([_all_of(step) for step in steps])

    def _steps(
        self,
        plan: LoweringPlan,
        x: Address,
        y: Address,
        product: Callable[[Address, Address], Callable[[], None]],
    ) -> list[Callable[[], None]]:
        device, lowering, size = self._device, self._lowering, self._dtype.itemsize
        strides, result_strides = plan.strides(lowering), plan.result_strides(lowering)
        x_bytes = lowering.in_channels * lowering.in_height * lowering.in_width * size
        y_bytes = lowering.out_channels * lowering.positions * size
        # An image that is its own lowered matrix is multiplied where it lies, but for columns of zeros that it lacks.
        in_place = lowering.is_identity and plan.layout == "batched" and lowering.depth == lowering.rows
        lowered = (
            0 if in_place else self._reserve(plan, "lowered", plan.chunk * lowering.depth * lowering.positions * size)
        )
        steps = []
        for first in range(0, self._batch, plan.chunk):
            images, outputs = x + first * x_bytes, y + first * y_bytes
            if not in_place:
                steps.append(_bound(device.lower, images, lowered, plan.chunk, strides))
            result = outputs if plan.layout == "batched" else self._reserve(plan, "product", plan.chunk * y_bytes)
            steps.append(product(images if in_place else lowered, result))
            steps.append(_bound(device.finish, result, outputs, self._bias, plan.chunk, result_strides))
        return steps

    def _reserve(self, plan: LoweringPlan, what: str, size_bytes: int) -> Address:
        """Scratch memory of a plan; its zeros in the rows that nothing writes belong to the plan's layout."""
        key = f"{what} {plan.layout} {plan.chunk}"
        if key not in self._scratch:
            self._scratch[key] = self._device.allocate(size_bytes)
        return self._scratch[key]


def _after_a_run(runs: Runs) -> str:
    runs()
    return ""


def fastest(
    plans: Sequence[LoweringPlan],
    make: Callable[[LoweringPlan], Runs],
    problem_of: Callable[[Runs], str] = _after_a_run,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> tuple[LoweringPlan, dict[str, Any]]:
    """The plan whose few probing runs were fastest, and what was found of every plan.

    Args:
        plans: to try, at least one.
        make: the runs of a plan.
        problem_of: runs it once and tells what is wrong with the outputs, if anything: a library may compute
            nonsense, or nothing, of sizes that it does not support, and do it quickly.
        clock: nanoseconds, rising.

    Returns:
        The plan, and microseconds, or the reason why it does not run, by the name of the plan.

    Raises:
        RuntimeError: none of them runs; the reasons.
    """
    found: dict[str, Any] = {}
    times: dict[LoweringPlan, float] = {}
    for plan in plans:
        try:
            runs = make(plan)
            if problem := problem_of(runs):
                found[plan.name] = problem
                continue
            spent: list[float] = []
            while len(spent) < PROBING_RUNS and sum(spent) < PROBING_US:
                begin = clock()
                runs()
                spent.append((clock() - begin) / 1000)
        except Exception as error:  # whatever a library raises: the other plans may run
            found[plan.name] = f"{type(error).__name__}: {error}"
            continue
        found[plan.name] = times[plan] = min(spent)
    if not times:
        raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in found.items()))
    return min(times, key=lambda plan: times[plan]), found


def _all_of(steps: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for step in steps:
            step()

    return run


def _bound(function: Callable[..., None], *arguments: Any) -> Callable[[], None]:  # noqa: ANN401
    return lambda: function(*arguments)
