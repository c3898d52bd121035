"""One-layer models, cut out of a real one with its weights and the shapes that really arrive there."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_sparseconv.converter.analyse import default_opset
from onnx_sparseconv.converter.model_io import save
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.kernels.unified_csr import Array, row_lengths
from onnx_sparseconv.runtime.inputs import make_random_inputs, model_inputs, require_elements, resolve_shapes
from onnx_sparseconv.runtime.session import Provider, make_session, translated_errors
from onnx_sparseconv.tuner.options import Case
from onnx_sparseconv.tuner.regions import Region, RegionFinder

Shape = tuple[int, ...]
_SHAPE_PREFIX = "sparseconv_tuner_shape_of_"
# Weights alike have row lengths within these shares of each other.
_NONZEROS_STEP = 1.02
_LONGEST_ROW_STEP = 1.1


@dataclass(frozen=True, eq=False)
class Piece:
    """A dense model of one layer and its neighbours, at one shape. Its names say nothing of the model it came from.

    Attributes:
        model: inputs and output have the layer's element type and known shapes.
        layer: hash of all of it, 64 hexadecimal digits.
        likeness: hash of what its time depends on: everything but the values, of which only their number and their
            distribution over the output channels count, roughly.
    """

    model: ModelProto
    layer: str
    likeness: str


def run_for_shapes(
    proto: ModelProto, tensors: Sequence[str], case: Case, name: str = "the model", provider: Provider = "cpu"
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Run a model once and note the shapes of its inputs and of some tensors of its main graph.

    Args:
        proto: the model; it is not changed.
        tensors: names.
        case: the shapes of its inputs.
        name: of the model, for messages.
        provider: what runs it.

    Returns:
        Shapes of the inputs, and of the tensors.

    Raises:
        UsageError: the case does not fit the model, or an input is empty.
        ModelError: the model cannot be run.
    """
    probe = ModelProto()
    probe.CopyFrom(proto)
    for tensor in tensors:
        shape_name = _SHAPE_PREFIX + tensor
        probe.graph.node.append(helper.make_node("Shape", [tensor], [shape_name], name=shape_name))
        probe.graph.output.append(helper.make_tensor_value_info(shape_name, TensorProto.INT64, [None]))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "probe.onnx"
        save(probe, path)
        try:
            session = make_session(path, provider=provider)
        except ModelError as error:
            raise ModelError(str(error).replace(str(path), name)) from error
        wanted = model_inputs(session)
        shapes = resolve_shapes(wanted, case.shapes, case.batch)
        require_elements(shapes)
        feed = make_random_inputs(wanted, shapes)
        given = ", ".join(f"{entry} {'x'.join(map(str, shape))}" for entry, shape in shapes.items())
        with translated_errors(f"{name} cannot be run on {given}"):
            found = session.run([_SHAPE_PREFIX + tensor for tensor in tensors], feed) if tensors else []
    return shapes, {tensor: tuple(map(int, shape)) for tensor, shape in zip(tensors, found, strict=True)}


def bytes_read(proto: ModelProto, regions: Iterable[Region], shapes: Mapping[str, Shape]) -> int:
    """What a run of a dense model reads, at least: all that is constant, and the inputs of its convolutions whose
    shapes are known.
    """
    constants: int = sum(
        math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in proto.graph.initializer
    )
    inputs: dict[str, int] = {}
    for region in regions:
        assert region.site.weight is not None
        known = {tensor.name: shapes[tensor.name] for tensor in region.inputs if tensor.name in shapes}
        inputs |= {name: region.site.weight.values.itemsize * math.prod(shape) for name, shape in known.items()}
    return constants + sum(inputs.values())


def cut(view: ModelView, finder: RegionFinder, region: Region, shapes: Mapping[str, Shape]) -> Piece:
    """Make a model of a region.

    Args:
        view: the model that it lies in.
        finder: what found it.
        region: what to cut out.
        shapes: of its inputs, by name.

    Raises:
        ModelError: an input has no shape, as where its branch of an If did not run.
    """
    site = region.site
    assert site.weight is not None
    element_type = site.weight.element_type
    names: dict[int, str] = {}
    inputs = []
    for index, tensor in enumerate(region.inputs):
        if tensor.name not in shapes:
            raise ModelError(f"the shape of {tensor.name!r} is not known")
        names[id(tensor)] = f"x{index}"
        inputs.append(helper.make_tensor_value_info(f"x{index}", element_type, shapes[tensor.name]))
    names[id(region.output)] = "y"
    constants: list[TensorProto] = []
    nodes = []
    for index, node in enumerate(region.nodes):
        for tensor in node.inputs:
            if tensor.is_empty() or id(tensor) in names:
                continue
            is_weight = tensor is site.node.inputs[1]
            found = site.weight if is_weight else finder.constant(tensor)
            assert found is not None
            names[id(tensor)] = "w" if is_weight else f"c{len(constants)}"
            constants.append(_constant(found.stored, found.values, names[id(tensor)]))
        for position, tensor in enumerate(node.outputs):
            if tensor.name:
                names.setdefault(id(tensor), f"t{index}_{position}")
        nodes.append(_node(view, node, names, "conv" if node is site.node else f"n{index}"))
    graph = helper.make_graph(
        nodes,
        "layer",
        inputs,
        [helper.make_tensor_value_info("y", element_type, [None] * site.weight.values.ndim)],
        constants,
    )
    opset = default_opset(view.proto)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=_ir_version(view))
    model.producer_name = model.producer_version = ""
    weight = site.weight.values
    return Piece(model, _hash(model), _likeness(model, weight))


def _ir_version(view: ModelView) -> int:
    # From version 4 on an initializer need not be an input.
    return max(int(view.proto.ir_version), 4)


def _constant(stored: TensorProto | None, values: Array, name: str) -> TensorProto:
    if stored is None:
        return numpy_helper.from_array(np.ascontiguousarray(values), name)
    tensor = TensorProto()
    tensor.CopyFrom(stored)
    tensor.name, tensor.doc_string = name, ""
    return tensor


def _node(view: ModelView, node: gs.Node, names: Mapping[int, str], name: str) -> NodeProto:
    origin = view.origin(node)
    assert origin is not None
    proto = NodeProto(op_type=origin.op_type, name=name)
    proto.attribute.extend(origin.attribute)
    proto.input.extend("" if tensor.is_empty() else names[id(tensor)] for tensor in node.inputs)
    proto.output.extend(names[id(tensor)] if tensor.name else "" for tensor in node.outputs)
    return proto


def _hash(model: ModelProto) -> str:
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def _likeness(model: ModelProto, weight: Array) -> str:
    outline = ModelProto()
    outline.CopyFrom(model)
    for tensor in outline.graph.initializer:
        kept = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        tensor.CopyFrom(kept)
    lengths = row_lengths(weight)
    total, longest = int(lengths.sum()), int(lengths.max())
    steps = (_steps(total, _NONZEROS_STEP), _steps(longest * lengths.size / max(total, 1), _LONGEST_ROW_STEP))
    return hashlib.sha256(f"{_hash(outline)} {steps}".encode()).hexdigest()


def _steps(value: float, step: float) -> int:
    """On which step of a geometric staircase a value lies."""
    return round(float(np.log(max(value, 1.0)) / np.log(step)))
