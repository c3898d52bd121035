"""Walks over the nodes of a model: into subgraphs, and from function to function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import FunctionProto, GraphProto, NodeProto


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs in a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def iterate_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Nodes and the nodes of their subgraphs, outer before inner."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from iterate_nodes(graph.node)


def recursive_function(functions: Iterable[FunctionProto]) -> str:
    """The name of a function that calls itself, by way of others too; empty where none does.

    ONNX allows none. Version 1.17 of onnx follows calls without an end, until there is no stack left, and ONNX Runtime
    1.20 crashes.
    """
    calls = {(f.domain, f.name): {(n.domain, n.op_type) for n in iterate_nodes(f.node)} for f in functions}
    # What calls no function that is left over calls none that is recursive.
    while ready := [name for name, called in calls.items() if not called & calls.keys()]:
        for name in ready:
            del calls[name]
    # Nor is recursive what none of these calls.
    called = set().union(*calls.values()) if calls else set()
    return next((name for domain, name in calls if (domain, name) in called), "")
