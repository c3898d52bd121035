"""The body of the process in which `provider_check` tries a provider."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import numpy as np
import onnx

from onnx_sparseconv.custom_ops.function_body import MIN_IR_VERSION, make_functions
from onnx_sparseconv.custom_ops.schema import DOMAIN, OPSET_VERSION, SPARSE_CONV, ConvGeometry, SparseConvAttributes
from onnx_sparseconv.errors import SparseConvError
from onnx_sparseconv.kernels.unified_csr import encode
from onnx_sparseconv.runtime.kernels import kernels_of, require_sparse_kernels_on
from onnx_sparseconv.runtime.provider_check import ProviderCheck
from onnx_sparseconv.runtime.run import run_session
from onnx_sparseconv.runtime.session import PROVIDER_NAMES, Provider, import_onnxruntime, make_session

_NODE = "sparseconv_doctor"
_TOLERANCE = 1e-5


def main(provider: Provider) -> None:
    """Body of the child: print the result of `try_provider` as JSON, on the last line of stdout."""
    sys.stdout.write(json.dumps(dataclasses.asdict(try_provider(provider))) + "\n")


def try_provider(provider: Provider) -> ProviderCheck:
    """Run a tiny SparseConv model on a provider, here, and compare it with what numpy gives."""
    try:
        if PROVIDER_NAMES[provider] not in import_onnxruntime().get_available_providers():
            return ProviderCheck(provider, False, False, "not in this onnxruntime")
        model, feed, expected = tiny_model()
        session = make_session(model, provider=provider)
        (actual,) = run_session(session, feed, "a tiny SparseConv model").values()
        (use,) = kernels_of([(_NODE, "SparseConv")], use_library=True)
        require_sparse_kernels_on(provider, [use])
    except SparseConvError as error:
        return ProviderCheck(provider, True, False, str(error))
    error_max = float(np.abs(actual - expected).max())
    works = error_max <= _TOLERANCE
    text = "runs SparseConv correctly" if works else f"gives wrong results (error {error_max:.2g})"
    return ProviderCheck(provider, True, works, text, use.kernel)


def tiny_model() -> tuple[bytes, dict[str, Any], Any]:
    """A model of one 1x1 SparseConv, its input, and its output as numpy computes it."""
    opset = 17
    weight = np.zeros((8, 8, 1, 1), np.float32)
    weight[np.arange(8), np.arange(8)[::-1]] = np.arange(1, 9, dtype=np.float32)[:, None, None]
    attributes = SparseConvAttributes(ConvGeometry((1, 1), (1, 1), (0, 0, 0, 0), (1, 1)), encode(weight))
    values = {
        name: onnx.numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
        for name, value in attributes.to_node_attributes().items()
    }
    node = onnx.helper.make_node(SPARSE_CONV, ["x", ""], ["y"], name=_NODE, domain=DOMAIN, **values)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], "tiny", [value("x", 1, [1, 8, 4, 4])], [value("y", 1, [1, 8, 4, 4])])
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    model = onnx.helper.make_model(
        graph, functions=make_functions([SPARSE_CONV], opset), opset_imports=imports, ir_version=MIN_IR_VERSION
    )
    # Of halves: kernels that round floats to as many bits as TF32 has are as exact as others.
    x = np.random.default_rng(0).standard_normal((1, 8, 4, 4)).astype(np.float16).astype(np.float32)
    expected = np.einsum("kc,nchw->nkhw", weight[:, :, 0, 0], x)
    return model.SerializeToString(), {"x": x}, expected
