"""Branches of If that ONNX Runtime may take over into the graph around them when it opens a model."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from onnx_sparseconv.converter.model_view import Scope

# What they give may follow from the sizes of the input alone, which may be fixed.
_READ_SIZES = ("Shape", "Size")


class FixedBranches:
    """Finds the If whose condition may be resolved without running the model.

    ONNX Runtime puts the nodes of the branch that such an If takes into the graph around it. Where functions have been
    inlined in the branch, as the portable forms of our ops are without the library, and these hold If themselves, it
    may meet a node before the one that it reads, and then does not open the model (seen with 1.32).

    Args:
        scopes: all of the model.
    """

    def __init__(self, scopes: Sequence[Scope]) -> None:
        self._scopes = scopes
        # By a function and its parameter; False while it is looked for, so that functions that call each other end.
        self._is_given: dict[tuple[str, str, str], bool] = {}

    def around(self, scope: Scope) -> str:
        """The name of the innermost such If around a scope; empty where there is none."""
        while scope.parent is not None:
            node = scope.owner
            assert node is not None
            if node.op == "If" and node.inputs and self._may_be_fixed(node.inputs[0], scope.parent):
                return str(node.name or node.outputs[0].name)
            scope = scope.parent
        return ""

    def _may_be_fixed(self, tensor: gs.Tensor, scope: Scope) -> bool:
        """Whether a value may be known before the model runs: nothing that it is made of is an input of the model or of
        a loop. What a function gets is what any of its callers gives it.
        """
        seen: set[int] = set()
        waiting = [tensor]
        while waiting:
            found = waiting.pop()
            if isinstance(found, gs.Constant) or found.is_empty() or id(found) in seen:
                continue
            seen.add(id(found))
            if not found.inputs:
                if not self._may_be_given(found, scope):
                    return False
            elif found.inputs[0].op not in _READ_SIZES:
                waiting.extend(found.inputs[0].inputs)
        return True

    def _may_be_given(self, parameter: gs.Tensor, scope: Scope) -> bool:
        """Whether a caller of the scope's function gives a value that may be fixed for one of its inputs."""
        function = scope.function
        if function is None or parameter.name not in function.input:
            return False
        key = (function.domain, function.name, parameter.name)
        if key not in self._is_given:
            self._is_given[key] = False
            index = list(function.input).index(parameter.name)
            self._is_given[key] = any(
                self._may_be_fixed(node.inputs[index], around)
                for around in self._scopes
                for node in around.graph.nodes
                if (node.domain or "", node.op) == key[:2] and index < len(node.inputs)
            )
        return self._is_given[key]
