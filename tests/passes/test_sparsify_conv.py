"""SparsifyConv: only what was chosen is replaced, and the rest of the graph is as it was."""

import numpy as np
import onnx
from onnx import helper

from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import DOMAIN, SPARSE_CONV
from onnx_sparseconv.kernels.unified_csr import decode
from onnx_sparseconv.passes.sparsify_conv import SparsifyConv
from tests.support.odd_models import FEEDS, conv, model, pruned, tensor
from tests.support.sparse_nodes import attributes_for


def three_convs():
    nodes = [
        conv(out="a", name="first"),
        helper.make_node("Conv", ["X", "W", "B"], ["b"], name="second", pads=[1] * 4),
        helper.make_node("Conv", ["X", "W", ""], ["c"], name="third", pads=[1] * 4),
        helper.make_node("Sum", ["a", "b", "c"], ["Y"], name="sum"),
    ]
    return model(nodes, [tensor(pruned(), "W"), tensor(np.zeros(8), "B", np.float32)])


def apply(proto, *names):
    view = ModelView(proto)
    chosen = [n for n in view.scopes[0].graph.nodes if n.name in names]
    attributes = attributes_for(pruned())
    sparsify = SparsifyConv({id(n): attributes for n in chosen}, {id(n): f"{n.name}_new" for n in chosen})
    changed = sum(sparsify.apply(scope.graph).changed for scope in view.scopes)
    return changed, view.write_back()


def test_nothing_chosen_changes_nothing():
    proto = three_convs()
    before = proto.SerializeToString(deterministic=True)
    assert apply(proto) == (0, set())
    assert proto.SerializeToString(deterministic=True) == before


def test_only_chosen_nodes_are_replaced_and_shared_weights_stay():
    proto, before = three_convs(), three_convs()
    assert apply(proto, "first", "third") == (2, set())
    assert [n.op_type for n in proto.graph.node] == [SPARSE_CONV, "Conv", SPARSE_CONV, "Sum"]
    assert [list(n.input) for n in proto.graph.node] == [["X", ""], ["X", "W", "B"], ["X", ""], ["a", "b", "c"]]
    assert [n.name for n in proto.graph.node] == ["first_new", "second", "third_new", "sum"]
    assert proto.graph.node[1] == before.graph.node[1]
    assert list(proto.graph.initializer) == list(before.graph.initializer)


def test_the_last_user_takes_the_weight_with_it():
    proto = three_convs()
    assert apply(proto, "first", "second", "third") == (3, {"W"})
    assert [t.name for t in proto.graph.initializer] == ["B"]
    assert list(proto.graph.node[1].input) == ["X", "B"]


def test_the_node_carries_the_weight():
    proto = three_convs()
    apply(proto, "second")
    node = proto.graph.node[1]
    assert node.domain == DOMAIN
    np.testing.assert_array_equal(decode(attributes_from_proto(node).weight), pruned())
    reread = onnx.NodeProto.FromString(node.SerializeToString())
    assert reread == node


def test_subgraphs_are_graphs_of_their_own():
    proto = FEEDS["outer-if"].build()
    view = ModelView(proto)
    inner = next(s for s in view.scopes if s.path == "if/then_branch")
    (node,) = inner.graph.nodes
    sparsify = SparsifyConv({id(node): attributes_for(pruned())}, {id(node): node.name})
    assert {s.path: sparsify.apply(s.graph).changed for s in view.scopes if s is not inner} == {
        "": 0,
        "if/else_branch": 0,
    }
    assert sparsify.apply(inner.graph).changed == 1
    assert view.write_back() == {"W"}
    then = next(a.g for a in proto.graph.node[0].attribute if a.name == "then_branch")
    assert [n.op_type for n in then.node] == [SPARSE_CONV]
