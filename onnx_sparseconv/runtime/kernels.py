"""Which kernel runs each SparseConv node of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import ModelProto

from onnx_sparseconv.custom_ops.schema import DOMAIN, OP_TYPES
from onnx_sparseconv.errors import ProviderError
from onnx_sparseconv.nodes import iterate_nodes

DENSE_KERNEL = "dense Conv (no library)"
NO_SPARSE_NODE = "the second model has no SparseConv node: this compares two ordinary models"
_MAX_NAMES = 4
UNKNOWN_KERNEL = "not known (ONNX Runtime removed or renamed the node)"


@dataclass(frozen=True)
class KernelUse:
    """A SparseConv node and what ran it.

    Attributes:
        node: its name, or that of its output.
        op_type: which of our ops.
        kernel: the native library's name of the kernel, or `DENSE_KERNEL` without the library.
        provider: short name of the provider that it belongs to, such as ``cuda``; empty where it is not known.
    """

    node: str
    op_type: str
    kernel: str
    provider: str = ""


def sparse_nodes(model: ModelProto) -> tuple[tuple[str, str], ...]:
    """Name and operator of every SparseConv node of a model, subgraphs included; a node without a name has its
    output's.
    """
    return tuple(
        (node.name or node.output[0], node.op_type)
        for node in iterate_nodes(model.graph.node)
        if node.domain == DOMAIN and node.op_type in OP_TYPES
    )


def kernels_of(nodes: Sequence[tuple[str, str]], *, use_library: bool) -> tuple[KernelUse, ...]:
    """What ran each of ``nodes`` in the newest live session that has nodes of these names.

    Args:
        nodes: as `sparse_nodes` gives them.
        use_library: whether that session was made with the native library.
    """
    if not use_library or not nodes:
        return tuple(KernelUse(name, op_type, DENSE_KERNEL) for name, op_type in nodes)
    from onnx_sparseconv.custom_ops.library import describe_kernels  # noqa: PLC0415

    newest = {record.node: record for record in describe_kernels()}
    return tuple(
        KernelUse(name, op_type, newest[name].kernel, newest[name].provider)
        if name in newest
        else KernelUse(name, op_type, UNKNOWN_KERNEL)
        for name, op_type in nodes
    )


def require_sparse_kernels_on(provider: str, kernels: Sequence[KernelUse]) -> None:
    """Refuse a session in which ONNX Runtime gave SparseConv nodes to another provider than was asked for.

    Raises:
        ProviderError: names the nodes.
    """
    elsewhere = [use for use in kernels if use.provider not in ("", provider)]
    if not elsewhere:
        return
    names = ", ".join(use.node for use in elsewhere[:_MAX_NAMES])
    more = f" and {len(elsewhere) - _MAX_NAMES} more" if len(elsewhere) > _MAX_NAMES else ""
    raise ProviderError(
        f"{provider} was asked for, but ONNX Runtime runs {len(elsewhere)} of {len(kernels)} SparseConv nodes on "
        f"{elsewhere[0].provider}: {names}{more}. Does this build of the native library have kernels for {provider}? "
        "sparseconv doctor shows it"
    )
