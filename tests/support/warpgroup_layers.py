"""Layers in every form of convolution that the warpgroup kernel for windows runs."""

from onnx_sparseconv.custom_ops.schema import ConvGeometry
from tests.support.sparse_models import geometry_2d

# Shape of the weight, size of the input, geometry.
WINDOWS = [
    ((64, 64, 3, 3), (14, 14), geometry_2d(pad=1)),
    ((130, 40, 3, 3), (7, 7), geometry_2d(pad=1)),
    ((64, 40, 3, 3), (5, 61), geometry_2d(pad=1)),
    ((48, 32, 2, 5), (9, 30), ConvGeometry((2, 5), (1, 1), (1, 2, 0, 2), (1, 1))),
    ((64, 32, 3, 3), (30, 28), geometry_2d(3, 2, 1)),
    ((64, 32, 3, 3), (12, 23), geometry_2d(3, 2, 0)),
    ((40, 33, 3, 3), (16, 13), ConvGeometry((3, 3), (2, 1), (2, 1, 2, 1), (2, 1))),
    ((96, 24, 3, 3), (9, 16), ConvGeometry((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), group=2)),
    ((64, 32, 5, 5), (7, 27), ConvGeometry((5, 5), (1, 1), (2, 2, 2, 3), (1, 1))),
    ((24, 3, 3, 3), (13, 15), geometry_2d(pad=1)),
    ((24, 8, 7, 7), (13, 15), geometry_2d(7, pad=3)),
    ((9, 40, 5, 5), (17, 38), geometry_2d(5, 2, 2)),
    ((100, 300, 1, 3), (1, 54), ConvGeometry((1, 3), (1, 1), (0, 2, 0, 2), (1, 1))),
]
