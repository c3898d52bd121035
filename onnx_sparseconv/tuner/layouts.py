"""How ONNX Runtime keeps the activations of dense layers, and what changing that costs.

A session has one layout for all its dense layers. Sparse layers read and write the model's own, so that a tensor
changes its layout where dense layers meet sparse ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx import ModelProto, helper

from onnx_sparseconv.custom_ops.function_body import MIN_OPSET
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


def change_models(inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> tuple[ModelProto, ModelProto]:
    """Models that change the layout of a layer's tensors as ONNX Runtime does around a dense one on CUDA.

    Args:
        inputs: of the layer, ``[N, C, D1..Dn]`` each.
        outputs: of the layer, the same.

    Returns:
        One that brings the inputs to ``[N, D1..Dn, C]``, and one that brings outputs back from there.
    """
    return _transposes(inputs, to_last=True), _transposes(outputs, to_last=False)


def _transposes(arrays: Mapping[str, Array], *, to_last: bool) -> ModelProto:
    nodes, before, behind = [], [], []
    for name, array in arrays.items():
        batch, channels, *sizes = array.shape
        shape = array.shape if to_last else (batch, *sizes, channels)
        last = array.ndim - 1
        order = [0, *range(2, array.ndim), 1] if to_last else [0, last, *range(1, last)]
        element_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        before.append(helper.make_tensor_value_info(name, element_type, shape))
        behind.append(helper.make_tensor_value_info(f"{name}_changed", element_type, None))
        nodes.append(helper.make_node("Transpose", [name], [f"{name}_changed"], perm=order))
    graph = helper.make_graph(nodes, "layouts", before, behind)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", MIN_OPSET)], ir_version=4)
