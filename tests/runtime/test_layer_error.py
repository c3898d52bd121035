from __future__ import annotations

import numpy as np
import pytest

from onnx_sparseconv.converter.conv_sites import output_sizes
from onnx_sparseconv.custom_ops.schema import ConvGeometry
from onnx_sparseconv.runtime.layer_error import error_ratio, exact_values, layer_error, sample_places
from tests.support.sparse_nodes import convolve


def _relu(values):
    return np.maximum(values, 0)


@pytest.mark.parametrize(
    ("x_shape", "weight_shape", "geometry"),
    [
        ((2, 6, 9, 7), (4, 6, 3, 3), ConvGeometry((3, 3), (1, 1), (1, 1, 1, 1), (1, 1))),
        ((3, 6, 11, 8), (4, 3, 3, 2), ConvGeometry((3, 2), (2, 1), (1, 0, 2, 1), (2, 3), 2)),
        ((2, 5, 6, 6), (3, 5, 1, 1), ConvGeometry((1, 1), (1, 1), (0,) * 4, (1, 1))),
        ((2, 7, 30), (5, 7, 4), ConvGeometry((4,), (3,), (2, 1), (2,))),
        ((1, 4, 5, 6, 7), (4, 1, 3, 2, 3), ConvGeometry((3, 2, 3), (1,) * 3, (1,) * 6, (1,) * 3, 4)),
    ],
)
def test_the_exact_values_are_those_of_a_whole_convolution(x_shape, weight_shape, geometry):
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal(x_shape).astype(np.float32), rng.standard_normal(weight_shape).astype(np.float16)
    bias = rng.standard_normal(weight_shape[0]).astype(np.float32)
    whole = convolve(
        x, weight, strides=geometry.strides, pads=geometry.pads, dilations=geometry.dilations, group=geometry.group
    )
    assert whole.shape[2:] == output_sizes(geometry, x_shape[2:])
    whole = _relu(whole + bias.astype(np.float64).reshape(1, -1, *(1,) * (len(x_shape) - 2)))
    places = sample_places(whole.shape, 50)
    exact = exact_values(x, weight, bias, geometry=geometry, places=places, activation=_relu)
    error = layer_error(whole, exact, places)
    assert error.max_abs < 1e-12
    assert error.num_values == len(places) * weight_shape[0]
    unrelated = layer_error(whole + 0.5, exact, places)
    assert unrelated.max_abs == pytest.approx(0.5)
    assert unrelated.rms == pytest.approx(0.5)


def test_corners_are_always_among_the_places():
    places = {tuple(place) for place in sample_places((4, 3, 10, 20), 5).tolist()}
    assert {(0, 0, 0), (3, 9, 19), (0, 9, 0), (3, 0, 19)} <= places
    assert all(0 <= n < 4 and 0 <= h < 10 and 0 <= w < 20 for n, h, w in places)
    assert len(sample_places((1, 1, 1), 5)) == 1


def test_an_error_is_told_from_nan_and_from_a_wrong_shape():
    places = sample_places((1, 2, 4), 0)
    exact = np.asarray([[1.0, 2.0], [3.0, 4.0]])
    y = np.zeros((1, 2, 4))
    y[0, :, 0], y[0, :, 3] = (1, np.nan), (3, 4.5)
    error = layer_error(y, exact, places)
    assert (error.num_nonfinite, error.num_values, error.max_abs) == (1, 4, 0.5)
    assert error.rms_relative == pytest.approx(np.sqrt(0.25 / 26))
    with pytest.raises(ValueError, match="does not match"):
        layer_error(y[:, :1], exact, places)
    zero = layer_error(np.zeros((1, 2, 4)), np.zeros((2, 2)), places)
    assert (zero.rms, zero.rms_relative) == (0, None)
    assert error_ratio(error, zero) is None
    assert error_ratio(error, error) == 1
