"""Rounding errors beside those of ONNX Runtime's own Conv, both against float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnx_sparseconv.converter import ConvertOptions, convert, gpu_predictions
from onnx_sparseconv.custom_ops.schema import ConvGeometry
from onnx_sparseconv.runtime.layer_error import error_ratio, exact_values, layer_error, sample_places
from onnx_sparseconv.runtime.session import make_session
from tests.support.gpu_checks import image_bytes
from tests.support.sparse_models import geometry_2d, random_weight

LAYERS = {
    "3x3 64": ((64, 64, 3, 3), geometry_2d(), (8, 64, 56, 56)),
    "3x3 512": ((512, 512, 3, 3), geometry_2d(), (4, 512, 14, 14)),
    "1x1 1024": ((256, 1024, 1, 1), geometry_2d(1, 1, 0), (8, 1024, 14, 14)),
    "1-D": ((100, 300, 3), ConvGeometry((3,), (1,), (0, 0), (1,)), (16, 300, 56)),
}
# How many times the error of ONNX Runtime's float16 Conv a float16 result may have.
LARGEST_RATIO = 4.0


def dense_model(weight, geometry):
    element = helper.np_dtype_to_tensor_dtype(weight.dtype)
    shape = ["N", weight.shape[1], *(f"d{i}" for i in range(weight.ndim - 2))]
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv", pads=list(geometry.pads))
    return helper.make_model(
        helper.make_graph(
            [node],
            "g",
            [helper.make_tensor_value_info("x", element, shape)],
            [helper.make_tensor_value_info("y", element, [None] * weight.ndim)],
            [numpy_helper.from_array(weight, "w")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )


@pytest.fixture(autouse=True)
def _code_for_all(monkeypatch):
    """Also for layers that the library's own kernels would run faster."""
    monkeypatch.setattr(gpu_predictions, "_predict_library", lambda *_: None)


@pytest.mark.parametrize("density", [0.05, 0.2])
@pytest.mark.parametrize(
    ("kernel", "name"),
    [*itertools.product(("csr", "tensor", "wgmma", "cluster", "generated"), LAYERS), ("segments", "1x1 1024")],
)
def test_float16_errors_stay_near_those_of_the_dense_convolution(request, gpu, name, kernel, density):
    weight_shape, geometry, x_shape = LAYERS[name]
    weight = random_weight(weight_shape, density, dtype=np.float16)
    x = np.random.default_rng(0).standard_normal(x_shape).astype(np.float16)
    dense = dense_model(weight, geometry)
    for axis, size in enumerate(x_shape[2:], 2):
        dense.graph.input[0].type.tensor_type.shape.dim[axis].dim_value = size
    targets = (request.getfixturevalue("target"),) if kernel == "generated" else ()
    converted, _ = convert(dense, options=ConvertOptions(force=True, targets=targets))
    if kernel == "generated" and not image_bytes(converted):
        # Its sums are too long: the other kernel, which adds up in float, takes its place.
        assert (name, density) == ("3x3 512", 0.2)
        kernel = "auto"
    theirs = make_session(dense, provider="cuda", use_library=False).run(None, {"x": x})[0]
    ours = gpu.session(converted, cuda_kernel=kernel).run(None, {"x": x})[0]
    places = sample_places(theirs.shape)
    exact = exact_values(x, weight, None, geometry=geometry, places=places)
    errors = [layer_error(y, exact, places) for y in (ours, theirs)]
    assert errors[0].num_nonfinite == errors[1].num_nonfinite == 0
    ratio = error_ratio(*errors)
    assert ratio is not None
    assert ratio <= LARGEST_RATIO, errors
