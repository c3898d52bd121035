"""A convolution with the neighbours that run as one with it, dense or sparse.

What is timed is not a bare Conv: ONNX Runtime fuses a dense one with what follows, and so do the passes around a
sparse one. A region holds what either of them takes in, so that neither is timed without what it would get for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnx_sparseconv.converter.constants import ConstantResolver, ConstantTensor
from onnx_sparseconv.converter.conv_sites import ConvSite
from onnx_sparseconv.converter.model_view import ModelView, Scope
from onnx_sparseconv.kernels.unified_csr import Array
from onnx_sparseconv.passes.activations import Match, matches
from onnx_sparseconv.passes.base import RefusedError, has_no_further_output, is_standard
from onnx_sparseconv.passes.fuse_pool import read_pool

_SCALES = ("BatchNormalization", "Mul", "Add", "Sub", "Div")
_NOTHING = ("Identity", "Dropout")
_SUMS = ("Add", "Sum")
# Activations that only the dense Conv takes in: left out, the sparse one would seem to lose nothing by them.
_DENSE_ACTIVATIONS = ("Tanh", "Elu", "Softplus")
# Longer chains are no one's neighbours any more.
_MAX_STEPS = 6


@dataclass(frozen=True, eq=False)
class Region:
    """Nodes that are timed together.

    Attributes:
        site: the convolution among them.
        nodes: all of them, in the order of the graph.
        inputs: tensors that they read and whose value is only known at run time; the convolution's own data first.
        output: the one tensor that others read.
    """

    site: ConvSite
    nodes: tuple[gs.Node, ...]
    inputs: tuple[gs.Tensor, ...]
    output: gs.Tensor


class RegionFinder:
    """Finds the regions of a model's main graph. No node belongs to two.

    Args:
        view: the model.
        pools: whether a sparse convolution will take in the pool behind it.
    """

    def __init__(self, view: ModelView, *, pools: bool = False) -> None:
        self._pools = pools
        self.scope: Scope = view.scopes[0]
        self._pinned = view.pinned_names()
        self._resolver = ConstantResolver(view)
        self._position = {id(node): index for index, node in enumerate(self.scope.graph.nodes)}
        self._taken: set[int] = set()

    def find(self, sites: Sequence[ConvSite]) -> dict[int, Region]:
        """The region of each convolution of the main graph with a known weight, by the id of its node."""
        own = [site for site in sites if site.scope is self.scope and site.is_conv and site.weight is not None]
        self._taken = {id(site.node) for site in sites}
        # The sum of two convolutions goes to the later one, as in `FuseResidual`.
        behind = {id(site.node): self._behind(site) for site in reversed(own)}
        return {id(site.node): self._region(site, behind[id(site.node)]) for site in own}

    def constant(self, tensor: gs.Tensor) -> ConstantTensor | None:
        """A tensor's value, None where it is only known at run time or callers may set it."""
        found = self._resolver.resolve(tensor, self.scope)
        return None if found is None or found.overridable else found

    def _values(self, tensor: gs.Tensor) -> Array | None:
        found = self.constant(tensor)
        return None if found is None else found.values

    def _region(self, site: ConvSite, behind: list[gs.Node]) -> Region:
        before = self._before(site)
        nodes = sorted([*before, site.node, *behind], key=lambda node: self._position[id(node)])
        made = {id(tensor) for node in nodes for tensor in node.outputs}
        first = before[-1] if before else site.node
        inputs = {id(first.inputs[0]): first.inputs[0]}
        for tensor in (t for node in nodes for t in node.inputs):
            if not tensor.is_empty() and id(tensor) not in made and not self._is_constant(tensor, site):
                inputs.setdefault(id(tensor), tensor)
        last = behind[-1] if behind else site.node
        return Region(site, tuple(nodes), tuple(inputs.values()), last.outputs[0])

    def _is_constant(self, tensor: gs.Tensor, site: ConvSite) -> bool:
        return tensor is site.node.inputs[1] or self.constant(tensor) is not None

    def _behind(self, site: ConvSite) -> list[gs.Node]:
        """The nodes behind a convolution, in order."""
        found, is_whole = self._up_to_activation(site)
        last = found[-1] if found else site.node
        return found + self._pool(site, last.outputs[0]) if is_whole and self._pools else found

    def _up_to_activation(self, site: ConvSite) -> tuple[list[gs.Node], bool]:
        """Those up to the activation, and whether a sparse convolution takes in all of them and may go on to a pool."""
        assert site.weight is not None
        found: list[gs.Node] = []
        tensor, has_residual, is_whole = site.node.outputs[0], False, True
        while len(found) < _MAX_STEPS and tensor.name not in self._pinned:
            activation = self._activation(tensor, site.weight.values.dtype)
            if activation:
                found += self._take(activation)
                break
            node = self._sole_reader(tensor)
            if node is None:
                break
            others = [t for t in node.inputs if t is not tensor and not t.is_empty()]
            is_constant = all(self.constant(t) is not None for t in others) and len(others) < len(node.inputs)
            is_residual = is_standard(node, *_SUMS) and len(others) == 1 == len(node.inputs) - 1 and not has_residual
            if is_constant and is_standard(node, *_DENSE_ACTIVATIONS):
                found += self._take([node])
                is_whole = False
                break
            if not (is_constant and is_standard(node, *_SCALES, *_NOTHING)):
                if not is_residual:
                    break
                has_residual = True
            # Other scales may be of a form that is not folded.
            is_whole = is_whole and is_standard(node, "BatchNormalization", *_NOTHING)
            found += self._take([node])
            tensor = node.outputs[0]
        return found, is_whole

    def _pool(self, site: ConvSite, tensor: gs.Tensor) -> list[gs.Node]:
        """The pool that `FusePool` would take, or none."""
        node = None if tensor.name in self._pinned else self._sole_reader(tensor)
        if node is None or site.weight is None or not is_standard(node, "MaxPool") or not has_no_further_output(node):
            return []
        try:
            read_pool(node, site.weight.values.ndim - 2, None)
        except RefusedError:
            return []
        return self._take([node])

    def _before(self, site: ConvSite) -> list[gs.Node]:
        """The nodes before a convolution, the nearest first."""
        found: list[gs.Node] = []
        tensor = site.node.inputs[0]
        while len(found) < _MAX_STEPS and len(tensor.inputs) == 1 and len(tensor.outputs) == 1:
            node = tensor.inputs[0]
            if tensor.name in self._pinned or not self._is_free(node) or not is_standard(node, "Pad", *_SCALES):
                break
            if any(self.constant(t) is None for t in node.inputs[1:] if not t.is_empty()) or not node.inputs:
                break
            if self.constant(node.inputs[0]) is not None:
                break
            found += self._take([node])
            tensor = node.inputs[0]
        return found

    def _activation(self, tensor: gs.Tensor, dtype: np.dtype[np.floating[Any]]) -> list[gs.Node]:
        """The nodes that spell the activation of a tensor, when nobody else reads what lies between; else none."""
        try:
            for match in matches(tensor, dtype, self._values):
                if self._is_closed(tensor, match):
                    return list(match.nodes)
        except RefusedError:
            return []  # the op cannot express it, so no pass will take it
        return []

    def _is_closed(self, tensor: gs.Tensor, match: Match) -> bool:
        inside = {id(node) for node in match.nodes}
        between = [tensor, *(out for node in match.nodes[:-1] for out in node.outputs)]
        return (
            all(map(self._is_free, match.nodes))
            and all(id(reader) in inside for t in between for reader in t.outputs)
            and all(t.name not in self._pinned for t in between)
        )

    def _sole_reader(self, tensor: gs.Tensor) -> gs.Node | None:
        if len(tensor.outputs) != 1 or not self._is_free(tensor.outputs[0]):
            return None
        node = tensor.outputs[0]
        return node if all(not out.outputs and out.name not in self._pinned for out in node.outputs[1:]) else None

    def _is_free(self, node: gs.Node) -> bool:
        return id(node) in self._position and id(node) not in self._taken and bool(node.outputs)

    def _take(self, nodes: list[gs.Node]) -> list[gs.Node]:
        self._taken |= {id(node) for node in nodes}
        return nodes
