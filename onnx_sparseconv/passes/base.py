"""What every graph pass returns.

A pass is a class in a file of its own. Its docstring numbers its rules; ``apply`` only iterates, the work is done
for one node at a time, and what is refused says why in ``notes``. A pass edits onnx-graphsurgeon graphs under the
contract of `converter.model_view`.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_graphsurgeon as gs


@dataclass(frozen=True)
class PassResult:
    """Outcome of a pass on one graph.

    Attributes:
        graph: the graph, edited in place.
        changed: how many nodes the pass replaced, added or removed.
        notes: what was done or refused, one line each, for the report.
    """

    graph: gs.Graph | gs.Function
    changed: int
    notes: tuple[str, ...] = ()
