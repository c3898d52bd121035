"""A sample of layers on every kernel, to be run under compute-sanitizer.

``python -m tests.gpu.sanitized_sample warpgroups``, ``.. flat``, ``.. clusters``, ``.. segments``, ``.. tensor`` or
``.. others``. Prints one line a run; ends with an error where a result is wrong.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys

import numpy as np

from onnx_sparseconv.kernels import nvrtc
from tests.gpu.layers import (
    DEPTHWISE,
    FLAT,
    FLAT_DENSE,
    FLAT_DENSITY,
    GEMM,
    POOLS,
    SEGMENTS,
    TYPES,
    WARPGROUPS,
    case_of,
    concatenated_case_of,
)
from tests.support.gpu_checks import Place, check, static_model, with_images
from tests.support.sparse_models import SparseConvCase, geometry_2d, make_model, random_weight

# float16 maps of an odd size get no images for 1x1 kernels, see docs/gpu-kernels.md.
SAMPLE = {
    "3x3, 14 wide": TYPES,
    "3x3, 7 wide": TYPES,
    "3x3, stride 2": TYPES,
    "3x3, groups": TYPES,
    "1x1": TYPES,
    "1x1, 7 wide": (np.float32,),
    "1-D": TYPES,
    "3x3, one image": TYPES,
}

WARPGROUP_SAMPLE = (
    *("3x3, 7 wide", "1x3, 20 wide", "3x3, 24 wide", "3x3, 240 wide", "3x3, stride 2", "3x3, 32 wide, one image"),
    *("7x7, three channels, stride 2", "7x7, three channels, stride 2, odd planes", "1-D", "1-D, 112 words"),
    *("1x1", "1x1, 28 wide", "1x1, 7 wide", "1x1, few rows"),
)
# Whose weights have so few zeros that products of few channels are dense.
DENSE_SAMPLE = ("3x3, 24 wide", "3x3, stride 2", "1-D, 112 words")


CLUSTER_SAMPLE = ("3x3, 7 wide", "3x3, 14 wide", "3x3, 24 wide", "3x3, stride 2", "3x3, groups", "1x1", "1-D")


def run_warpgroups(place):
    layers = [(name, 0.1) for name in WARPGROUP_SAMPLE] + [(name, 0.6) for name in DENSE_SAMPLE]
    for name, density in layers:
        for dtype in TYPES:
            case, x_shape = case_of(name, dtype, density, layers=WARPGROUPS)
            sys.stdout.write(f"{name} {np.dtype(dtype)}: {check(place, case, x_shape, cuda_kernel='wgmma')}\n")
    for name, kernel in CONCATENATED_SAMPLE:
        for dtype in TYPES:
            case, x_shape = concatenated_case_of(name, dtype, 3)
            done = check(place, case, x_shape, cuda_kernel=kernel)
            sys.stdout.write(f"{name} of three inputs {np.dtype(dtype)}: {done}\n")


# Those of X that the kernel reads where they are, and those that it has copied.
CONCATENATED_SAMPLE = (("1x1", "wgmma"), ("1x1, 7 wide", "wgmma"), ("3x3, 14 wide", "csr"))
# Maps that are staged whole, and channel by channel.
CONCATENATED_CODE_SAMPLE = ("1x1", "1x1, 28 wide")


def run_clusters(place):
    for name in CLUSTER_SAMPLE:
        for dtype in TYPES:
            case, x_shape = case_of(name, dtype, layers=WARPGROUPS)
            done = check(place, case, (2, *x_shape[1:]), cuda_kernel="cluster")
            sys.stdout.write(f"{name} {np.dtype(dtype)}: {done}\n")


DENSE_FLAT_SAMPLE = ("3x3, 28 wide", "3x3, stride 2", "5x5")


def run_flat(place):
    layers = [(name, FLAT_DENSITY) for name in FLAT] + [(name, FLAT_DENSE) for name in DENSE_FLAT_SAMPLE]
    for name, density in layers:
        for dtype in TYPES:
            case, x_shape = case_of(name, dtype, density, layers=FLAT)
            done = check(place, case, (min(x_shape[0], 9), *x_shape[1:]), cuda_kernel="flat")
            sys.stdout.write(f"{name} {np.dtype(dtype)}: {done}\n")


def run_gemm(place):
    for name in GEMM:
        for dtype in TYPES:
            case, x_shape = case_of(name, dtype, layers=GEMM)
            done = check(place, case, x_shape, cuda_kernel="gemm")
            sys.stdout.write(f"{name} {np.dtype(dtype)}: {done}\n")


def run_segments(place):
    for name in SEGMENTS:
        for dtype in TYPES:
            case, x_shape = case_of(name, dtype, layers=WARPGROUPS)
            for batch in (x_shape[0], 1):
                done = check(place, case, (batch, *x_shape[1:]), cuda_kernel="segments")
                sys.stdout.write(f"{name} {np.dtype(dtype)}: {done}\n")
    for dtype in TYPES:
        case, x_shape = concatenated_case_of("1x1", dtype, 3)
        done = check(place, case, x_shape, cuda_kernel="segments")
        sys.stdout.write(f"1x1 of three inputs {np.dtype(dtype)}: {done}\n")


def run_tensor(place):
    for name, types in SAMPLE.items():
        for dtype in types:
            case, x_shape = case_of(name, dtype)
            for batch in (x_shape[0], 1):
                done = check(place, case, (batch, *x_shape[1:]), model=make_model(case), cuda_kernel="tensor")
                sys.stdout.write(f"{name} {np.dtype(dtype)}: {done}\n")


def run_others(place, target):
    """Run the sample on a place by the CSR kernel and generated code; ``target`` empty: without generated code."""
    for name, types in SAMPLE.items():
        for dtype in types:
            case, x_shape = case_of(name, dtype)
            kernels = [check(place, case, x_shape, model=make_model(case), cuda_kernel="csr")]
            if target:
                model = with_images(static_model(case, x_shape), target)
                kernels += [
                    check(place, case, x_shape, model=model, cuda_kernel="generated", cuda_splits=splits)
                    for splits in (1, 2)
                ]
            sys.stdout.write(f"{name} {np.dtype(dtype)}: {', '.join(kernels)}\n")
    for name in CONCATENATED_CODE_SAMPLE if target else ():
        for dtype in TYPES:
            case, x_shape = concatenated_case_of(name, dtype, 3)
            done = check(
                place, case, x_shape, model=with_images(static_model(case, x_shape), target), cuda_kernel="generated"
            )
            sys.stdout.write(f"{name} of three inputs {np.dtype(dtype)}: {done}\n")
    for name in DEPTHWISE:
        for dtype in TYPES:
            case, x_shape = case_of(name, dtype, 1.0, layers=DEPTHWISE)
            sys.stdout.write(f"depthwise {name} {np.dtype(dtype)}: {check(place, case, (2, *x_shape[1:]))}\n")
    for name in ("1x1", "1x1, 7 wide"):
        for dtype in TYPES:
            case, x_shape = concatenated_case_of(name, dtype, 4, layers=DEPTHWISE)
            done = check(place, case, (2, *x_shape[1:]))
            sys.stdout.write(f"depthwise {name} of four inputs {np.dtype(dtype)}: {done}\n")
    for dtype in TYPES:
        weight = random_weight((70, 300, 1, 1), 0.3, dtype=dtype)
        case = SparseConvCase(weight, geometry_2d(1, pad=0), dtype=np.dtype(dtype))
        done = ", ".join(check(place, case, (batch, 300, 1, 1), cuda_kernel="csr") for batch in (1, 9))
        sys.stdout.write(f"maps of one pixel {np.dtype(dtype)}: {done}\n")
    for pool, name in itertools.product(POOLS, ("3x3, 14 wide", "3x3, odd width")):
        for dtype in TYPES:
            case, x_shape = case_of(name, dtype, has_residual=False)
            kernel = check(place, dataclasses.replace(case, pool=pool), x_shape, cuda_kernel="csr")
            sys.stdout.write(f"{pool}, {name}, {np.dtype(dtype)}: {kernel}\n")


if __name__ == "__main__":
    if sys.argv[1] == "warpgroups":
        run_warpgroups(Place("cuda"))
    elif sys.argv[1] == "clusters":
        run_clusters(Place("cuda"))
    elif sys.argv[1] == "flat":
        run_flat(Place("cuda"))
    elif sys.argv[1] == "gemm":
        run_gemm(Place("cuda"))
    elif sys.argv[1] == "tensor":
        run_tensor(Place("cuda"))
    elif sys.argv[1] == "segments":
        run_segments(Place("cuda"))
    else:
        run_others(Place("cuda"), "native" if nvrtc.installed() else "")
