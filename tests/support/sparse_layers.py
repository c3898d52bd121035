"""Layers as the GPU code generator sees them, for tests."""

from __future__ import annotations

import numpy as np

from onnx_sparseconv.kernels.layer import make_layer
from tests.support.sparse_models import random_weight


def sparse_layer(shape=(64, 32, 3, 3), *, size=(28, 28), density=0.1, dtype=np.float32, stride=1, group=1):
    """A 2-D layer of random weights, padded by half of its kernel; ``size`` is that of its input."""
    return make_layer(
        random_weight(shape, density),
        strides=(stride, stride),
        dilations=(1, 1),
        pads=(shape[2] // 2,) * 4,
        group=group,
        element_type=np.dtype(dtype),
        activation=0,
        in_size=size,
    )


def layer_of(case, size):
    """The layer of a test case without an activation; ``size`` is that of its input."""
    return make_layer(
        case.weight,
        strides=case.geometry.strides,
        dilations=case.geometry.dilations,
        pads=case.geometry.pads,
        group=case.geometry.group,
        element_type=case.dtype,
        activation=0,
        in_size=size,
        source_channels=case.input_channels,
    )
