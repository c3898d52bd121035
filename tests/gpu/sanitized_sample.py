"""A sample of layers on every kernel, to be run under compute-sanitizer: ``python -m tests.gpu.sanitized_sample``.

Prints one line a run; ends with an error where a result is wrong.
"""

from __future__ import annotations

import sys

import numpy as np

from onnx_sparseconv.kernels import nvrtc
from tests.gpu.layers import TYPES, case_of
from tests.support.gpu_checks import Place, check, static_model, with_images
from tests.support.sparse_models import make_model

SAMPLE = ("3x3, 14 wide", "3x3, stride 2", "3x3, groups", "1x1, 7 wide", "1-D", "3x3, one image")


def main(place, target):
    """Run the sample on a place; ``target`` empty: without generated code."""
    for name in SAMPLE:
        for dtype in TYPES:
            case, x_shape = case_of(name, dtype)
            kernels = [check(place, case, x_shape, model=make_model(case), cuda_kernel="csr")]
            if target:
                model = with_images(static_model(case, x_shape), target)
                kernels += [
                    check(place, case, x_shape, model=model, cuda_kernel="generated", cuda_splits=splits)
                    for splits in (1, 2)
                ]
            sys.stdout.write(f"{name} {np.dtype(dtype)}: {', '.join(kernels)}\n")


if __name__ == "__main__":
    main(Place("cuda"), "native" if nvrtc.installed() else "")
