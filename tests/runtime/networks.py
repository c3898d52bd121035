"""Small models for the tests of the runtime and of the command line, dense and converted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_sparseconv.custom_ops.function_body import MIN_IR_VERSION, make_functions
from onnx_sparseconv.custom_ops.schema import DOMAIN, OPSET_VERSION, ConvGeometry, SparseConvAttributes
from onnx_sparseconv.kernels.unified_csr import encode

OPSET = 17


def weights(dtype=np.float32, channels=8, layers=2, sparsity=0.9, seed=1):
    """Weights ``[channels, channels, 3, 3]`` with most elements zero."""
    generator = np.random.default_rng(seed)
    result = []
    for _ in range(layers):
        weight = generator.standard_normal((channels, channels, 3, 3))
        weight[generator.random(weight.shape) < sparsity] = 0
        result.append(weight.astype(dtype))
    return result


def dense(layer_weights, *, batch="N", size=12, names=True, output="y", flat=False):
    """A chain of Conv and Relu; ``names`` False leaves the nodes without names."""
    return _network(layer_weights, batch=batch, size=size, names=names, output=output, flat=flat, sparse=False)


def sparse(layer_weights, *, batch="N", size=12, names=True, output="y", flat=False):
    """The same network with SparseConv instead of Conv."""
    return _network(layer_weights, batch=batch, size=size, names=names, output=output, flat=flat, sparse=True)


def save(model, path: Path) -> Path:
    """Write a model that onnx.checker accepts."""
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path


def _network(layer_weights, *, batch, size, names, output, flat, sparse):
    element = helper.np_dtype_to_tensor_dtype(layer_weights[0].dtype)
    channels = layer_weights[0].shape[0]
    nodes, initializers, value = [], [], "x"
    for number, weight in enumerate(layer_weights):
        name = f"conv{number}" if names else ""
        if sparse:
            nodes.append(_sparse_node(weight, value, f"c{number}", name))
        else:
            initializers.append(numpy_helper.from_array(weight, f"w{number}"))
            nodes.append(helper.make_node("Conv", [value, f"w{number}"], [f"c{number}"], name=name, pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{number}"], [f"r{number}"], name=f"relu{number}" if names else ""))
        value = f"r{number}"
    if flat:
        nodes.append(helper.make_node("GlobalAveragePool", [value], ["pooled"]))
        nodes.append(helper.make_node("Flatten", ["pooled"], [output]))
        shape = [batch, channels]
    else:
        nodes[-1].output[0] = output
        shape = [batch, channels, size, size]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", element, [batch, channels, size, size])],
        [helper.make_tensor_value_info(output, element, shape)],
        initializers,
    )
    imports = [helper.make_opsetid("", OPSET)]
    functions = []
    if sparse:
        imports.append(helper.make_opsetid(DOMAIN, OPSET_VERSION))
        functions = make_functions(["SparseConv"], OPSET)
    return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=MIN_IR_VERSION)


def _sparse_node(weight, source, target, name):
    geometry = ConvGeometry((3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    attributes = SparseConvAttributes(geometry, encode(weight), element_type=weight.dtype).to_node_attributes()
    plain = {k: numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for k, v in attributes.items()}
    return helper.make_node("SparseConv", [source, ""], [target], name=name, domain=DOMAIN, **plain)


def every_type():
    """A model that passes one input of every type on: their names are the types' names."""
    types = ["FLOAT", "DOUBLE", "FLOAT16", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"]
    types += ["BOOL", "STRING"]
    values = [(name.lower(), getattr(TensorProto, name)) for name in types]
    return helper.make_model(
        helper.make_graph(
            [helper.make_node("Identity", [name], [f"{name}/out:0"]) for name, _ in values],
            "every_type",
            [helper.make_tensor_value_info(name, code, ["batch", 4]) for name, code in values],
            [helper.make_tensor_value_info(f"{name}/out:0", code, ["batch", 4]) for name, code in values],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=MIN_IR_VERSION,
    )
