"""How ONNX Runtime keeps the activations of dense layers, and what changing that costs.

A session has one layout for all its dense layers. Sparse layers read and write the model's own, so that a tensor
changes its layout where dense layers meet sparse ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx import ModelProto, helper

from onnx_sparseconv.custom_ops.function_body import MIN_OPSET
from onnx_sparseconv.runtime.binding import TensorSpec
from onnx_sparseconv.runtime.cuda_mode import CudaMode, modes_for
from onnx_sparseconv.runtime.inputs import Array
from onnx_sparseconv.runtime.session import Provider


@dataclass(frozen=True)
class Layout:
    """One way to run the dense layers of a model.

    Attributes:
        name: as of the `CudaMode` without a graph.
        dense: name of the candidate that is a dense layer so.
        is_reordered: whether it is another layout than the model's.
        mode: of the CUDA provider; on the CPU nothing is set.
    """

    name: str
    dense: str
    is_reordered: bool
    mode: CudaMode = field(default_factory=CudaMode)


def layouts_of(provider: Provider) -> tuple[Layout, ...]:
    """The layouts that a model may run in."""
    if provider == "cpu":
        # ONNX Runtime blocks the channels, unasked.
        return (Layout("default", "dense", is_reordered=True),)
    return tuple(Layout(mode.name, f"dense, {mode.name}", mode.prefer_nhwc, mode) for mode in modes_for("best"))


@dataclass(frozen=True, eq=False)
class LayoutChange:
    """A model that changes the layout of tensors, as ONNX Runtime does around a dense layer on CUDA, and its inputs.

    Attributes:
        model: a Transpose for each tensor.
        inputs: any values, in the layout that it changes.
        outputs: shapes and types of what comes out.
    """

    model: ModelProto
    inputs: Mapping[str, Array]
    outputs: Mapping[str, TensorSpec]


def layout_changes(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> tuple[LayoutChange, LayoutChange]:
    """What stands before and behind a layer that has its channels last.

    Args:
        inputs: of the layer, ``[N, C, D1..Dn]``; what has another number of axes, as a scalar that is added, stays as
            it is.
        outputs: of the layer, ``[N, C, D1..Dn]``.

    Returns:
        What brings the inputs to ``[N, D1..Dn, C]``, and what brings outputs back from there.
    """
    ranks = {array.ndim for array in outputs.values()}
    before = {name: array for name, array in inputs.items() if array.ndim in ranks}
    return _change(before, to_last=True), _change(outputs, to_last=False)


def _change(arrays: Mapping[str, Array], *, to_last: bool) -> LayoutChange:
    nodes, before, behind = [], [], []
    inputs, outputs = {}, {}
    for name, array in arrays.items():
        batch, channels, *sizes = array.shape
        last, changed = array.ndim - 1, f"{name}_changed"
        order = [0, *range(2, array.ndim), 1] if to_last else [0, last, *range(1, last)]
        # The values may stay where they are: no time depends on them.
        inputs[name] = array if to_last else array.reshape(batch, *sizes, channels)
        outputs[changed] = TensorSpec((batch, *sizes, channels) if to_last else array.shape, array.dtype)
        element_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        before.append(helper.make_tensor_value_info(name, element_type, inputs[name].shape))
        behind.append(helper.make_tensor_value_info(changed, element_type, outputs[changed].shape))
        nodes.append(helper.make_node("Transpose", [name], [changed], perm=order))
    graph = helper.make_graph(nodes, "layouts", before, behind)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", MIN_OPSET)], ir_version=4)
    return LayoutChange(model, inputs, outputs)
