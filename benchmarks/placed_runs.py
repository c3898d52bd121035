"""Runs of a session of ONNX Runtime on inputs and outputs at given addresses, which other sessions use as well.

Like `onnx_sparseconv.runtime.binding.BoundRuns`, which has memory of its own for every session: too much to upload, and
to hold, for some thirty sessions of one large layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_sparseconv.runtime import binding
from onnx_sparseconv.runtime.binding import FIRST_GRAPH_ID, GRAPH_ID_ENTRY, NO_SYNCHRONISATION_ENTRY
from onnx_sparseconv.runtime.session import import_onnxruntime, translated_errors

if TYPE_CHECKING:
    import onnxruntime as ort


@dataclass(frozen=True)
class Place:
    """A tensor in the memory of the device.

    Attributes:
        address: of its first element.
        shape: its sizes.
        dtype: its type.
    """

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class PlacedRuns:
    """Calls run the session on one copy of input ``x`` and output ``y`` after the other."""

    def __init__(
        self,
        session: ort.InferenceSession,
        name: str,
        places: Sequence[tuple[Place, Place]],
        *,
        cuda_graph: bool,
    ) -> None:
        """Bind; nothing runs yet.

        Args:
            session: on CUDA, with an input ``x`` and an output ``y``.
            name: for messages.
            places: input and output of every copy; they have to outlive this.
            cuda_graph: whether the session captures CUDA graphs.

        Raises:
            ModelError: the session refuses the places.
        """
        self._session, self._name, self._next = session, name, 0
        runtime = import_onnxruntime()
        device = (binding.DEVICE_TYPES["cuda"], 0)
        self._bindings = []
        with translated_errors(f"{name}: its input and output cannot be bound"):
            for x, y in places:
                bound = session.io_binding()
                bound.bind_input("x", *device, x.dtype.type, list(x.shape), x.address)
                bound.bind_output("y", *device, y.dtype.type, list(y.shape), y.address)
                self._bindings.append(bound)
        numbers = range(len(places))
        self._waiting = [_run_options(runtime, cuda_graph, number, wait=True) for number in numbers]
        self._going_on = [_run_options(runtime, cuda_graph, number, wait=False) for number in numbers]

    def __call__(self) -> None:
        """Run on the next copy and wait for the device.

        Raises:
            ModelError: the run fails.
        """
        self._run(self._waiting)

    def burst(self, runs: int) -> None:
        """Run several times and wait for the device once, after the last run.

        Raises:
            ModelError: a run fails.
        """
        for _ in range(runs - 1):
            self._run(self._going_on)
        self._run(self._waiting)

    def _run(self, options: list[ort.RunOptions]) -> None:
        copy = self._next % len(self._bindings)
        self._next += 1
        with translated_errors(f"{self._name} cannot be run"):
            self._session.run_with_iobinding(self._bindings[copy], options[copy])


def _run_options(runtime: Any, cuda_graph: bool, copy: int, *, wait: bool) -> ort.RunOptions:  # noqa: ANN401
    # Every captured graph has the addresses that it was captured with, so each copy has a graph of its own.
    options = runtime.RunOptions()
    if cuda_graph:
        options.add_run_config_entry(GRAPH_ID_ENTRY, str(FIRST_GRAPH_ID + copy))
    if not wait:
        options.add_run_config_entry(NO_SYNCHRONISATION_ENTRY, "1")
    return options
