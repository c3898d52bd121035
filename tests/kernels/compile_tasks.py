"""Generators of source that the tests send to worker processes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from onnx_sparseconv.kernels.layer import Refusal
from onnx_sparseconv.kernels.source import SourceText
from tests.support.gpu_images import make_plan


@dataclass(frozen=True)
class TinyGenerator:
    """A kernel of one line, with a byte for each of the layer's non-zeros; refuses layers without any.

    It fails as it is told.
    """

    failure: str = ""

    def choose_plan(self, layer, architecture):
        if not layer.weight.any():
            return Refusal("it has no weights")
        return make_plan(architecture)

    def make_source(self, layer, plan):
        if self.failure == "crash":
            os._exit(9)
        if self.failure == "bug":
            raise ZeroDivisionError("oops")
        if self.failure == "syntax":
            return SourceText("what is this", {})
        number = np.count_nonzero(layer.weight)
        text = (
            f'#include "value.h"\n__device__ char nonzeros[{number}] = {{1}};\n'
            'extern "C" __global__ void sparseconv_generated(int* y) { *y = kValue + nonzeros[*y]; }\n'
        )
        return SourceText(text, {"value.h": f"constexpr int kValue = {plan.in_channels};"})

    make_linked_source = make_source
