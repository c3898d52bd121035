"""What layers take inside a network on a GPU, with as many images as keep it busy.

A layer by itself (`gpu_times`), run again and again, finds its code and some of its input in caches, and a dense one
has its layout changed for it. Inside a network, ONNX Runtime keeps dense layers' channels last, and adds bias and
activation with kernels of their own, which pass over the output once more each. The figures come from the kernels of
whole networks, by ``benchmarks/fit_gpu_rule.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.kernels.gpu_times import DenseWork, Figure, computed_and_moved_us, dense_work, sparse_work
from onnx_sparseconv.kernels.layer import SparseLayer
from onnx_sparseconv.kernels.plan import GeneratedPlan

# Whether something is so of one layer, or of each of many.
Flag = bool | NDArray[np.bool_]


@dataclass(frozen=True)
class CodeWork:
    """What a generated kernel has to do inside a network, for a batch.

    Attributes:
        work_us: microseconds by `estimate_cycles`.
        code_mb: of all tiles, in millions of bytes.
        in_mb, out_mb: of input and output, in millions of bytes.
    """

    work_us: Figure
    code_mb: Figure
    in_mb: Figure
    out_mb: Figure


@dataclass(frozen=True)
class NetworkModel:
    """Times of layers of one type in networks.

    Attributes:
        tflops: peak of dense products on tensor cores, of floats in TF32.
        half_depth: terms of a sum at which half of it is reached.
        half_moutputs: outputs, in millions, at which that is halved once more.
        bandwidth_tb: of dense products, terabytes a second.
        depthwise_tb: of dense depthwise convolutions.
        product_launch_us: of a dense product that computes nothing.
        window_us: more of one that is not 1x1.
        pass_launch_us: of a pass over the output that finds none.
        bias_us, activation_us, slow_activation_us: for a million outputs, of a pass that adds a bias, applies an
            activation, or applies a Clip or SiLU.
        code_launch_us: of a generated kernel that computes nothing.
        code_slowdown: of the generated kernel, against `estimate_cycles`.
        code_size_us: for code that no cache near has kept, for the root of a million bytes.
        code_in_us: for input that no cache has kept, for a million bytes.
        code_out_us: for output, likewise; below 0 where `estimate_cycles` counts too much for it.
    """

    tflops: float
    half_depth: float
    half_moutputs: float
    bandwidth_tb: float
    depthwise_tb: float
    product_launch_us: float
    window_us: float
    pass_launch_us: float
    bias_us: float
    activation_us: float
    slow_activation_us: float
    code_launch_us: float
    code_slowdown: float
    code_size_us: float
    code_in_us: float
    code_out_us: float

    def product_us(self, work: DenseWork) -> NDArray[np.float64]:
        """Microseconds of a dense product; arrays give arrays."""
        depth, outputs = np.asarray(work.depth), np.asarray(work.moutputs)
        share = depth / (depth + self.half_depth) * outputs / (outputs + self.half_moutputs)
        both = computed_and_moved_us(work, self.tflops * share, self.bandwidth_tb)
        return np.asarray(self.product_launch_us + self.window_us * np.asarray(work.is_window) + both, np.float64)

    def depthwise_us(self, work: DenseWork) -> NDArray[np.float64]:
        """The same of a dense depthwise convolution."""
        return np.asarray(self.product_launch_us + np.asarray(work.mbytes) / self.depthwise_tb, np.float64)

    def pass_us(self, moutputs: Figure, us_a_million: Figure) -> NDArray[np.float64]:
        """Microseconds of a pass over so many millions of outputs; arrays give arrays."""
        return np.asarray(self.pass_launch_us + us_a_million * np.asarray(moutputs), np.float64)

    def dense_us(
        self, work: DenseWork, *, is_depthwise: Flag, has_bias: Flag, has_activation: Flag, is_slow: Flag = False
    ) -> NDArray[np.float64]:
        """Microseconds of a dense layer, with the passes over its output; arrays give arrays."""
        found = np.where(is_depthwise, self.depthwise_us(work), self.product_us(work))
        activation_us = np.where(is_slow, self.slow_activation_us, self.activation_us)
        for is_made, us_a_million in ((has_bias, self.bias_us), (has_activation, activation_us)):
            found = found + np.where(is_made, self.pass_us(work.moutputs, us_a_million), 0.0)
        return np.asarray(found, np.float64)

    def code_us(self, work: CodeWork) -> NDArray[np.float64]:
        """Microseconds of a generated kernel; arrays give arrays."""
        moved_us = self.code_in_us * np.asarray(work.in_mb) + self.code_out_us * np.asarray(work.out_mb)
        computed_us = self.code_slowdown * np.asarray(work.work_us) + self.code_size_us * np.sqrt(work.code_mb)
        # Whatever is added up, it is not done before it was launched.
        return np.maximum(self.code_launch_us + computed_us + moved_us, self.code_launch_us + 1.0)

    def dense_layer_us(
        self, layer: SparseLayer, batch: int, *, has_bias: bool, has_activation: bool, is_slow: bool = False
    ) -> float:
        """Microseconds of a dense layer, with the passes over its output.

        Raises:
            ValueError: the layer's input size is not known.
        """
        work = dense_work(layer, batch)
        passes = {"has_bias": has_bias, "has_activation": has_activation, "is_slow": is_slow}
        return float(self.dense_us(work, is_depthwise=layer.is_depthwise, **passes))

    def code_layer_us(self, layer: SparseLayer, plan: GeneratedPlan, batch: int, clock_mhz: float) -> float:
        """Microseconds of a layer by a plan's generated kernel.

        Raises:
            ValueError: the layer's input size is not known.
        """
        return float(self.code_us(code_work(layer, plan, batch, clock_mhz)))


def code_work(layer: SparseLayer, plan: GeneratedPlan, batch: int, clock_mhz: float) -> CodeWork:
    """What a layer asks of a generated kernel inside a network; as `sparse_work`."""
    itemsize = layer.element_type.itemsize
    return CodeWork(
        work_us=sparse_work(layer, plan, batch, clock_mhz).work_us,
        code_mb=1e-6 * plan.num_tiles * plan.code_bytes,
        in_mb=1e-6 * batch * layer.in_channels * math.prod(layer.in_size or ()) * itemsize,
        out_mb=dense_work(layer, batch).moutputs * itemsize,
    )
