"""Measure GPU images without a GPU: their bytes, beside dense and unified-CSR weights, and what the compiler says.

    python benchmarks/image_bytes.py -o benchmarks/results/gpu-image-bytes.json

Times are of the processor, of all threads of this process: what else the machine does counts little.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from layers import make_weights
from results_head import results_head
from suite_rows import Layer, read_suite

from onnx_sparseconv.files import write_text
from onnx_sparseconv.kernels.compile import StraightLineCode, image_programs
from onnx_sparseconv.kernels.image_container import Image, pack
from onnx_sparseconv.kernels.layer import Refusal, SparseLayer, make_layer
from onnx_sparseconv.kernels.plan import GeneratedPlan, choose_plan
from onnx_sparseconv.kernels.targets import Target, resolve_targets
from onnx_sparseconv.kernels.unified_csr import encode
from onnx_sparseconv.runtime.environment import read_environment
from onnx_sparseconv.runtime.plain import to_json_text

SCHEMA_VERSION = 1
_RELU = 1
# Wider layers take minutes to compile; these show how bytes grow.
_MAX_OUT_CHANNELS = 128
_WIDE_LAYERS = ("3x3_256-256@56",)


def choose_layers() -> list[Layer]:
    """The layers of the suite gpu that are measured."""
    return [x for x in read_suite("gpu") if x.out_channels <= _MAX_OUT_CHANNELS or x.name in _WIDE_LAYERS]


def measure_layer(layer: Layer, sparsity: float, dtype: str, target: Target) -> dict[str, Any]:
    """Compile the image of a layer, with a Relu, and count.

    Returns:
        The record of the results file: sizes in bytes, times in seconds of processor time; ``refusal`` in the place of
        what depends on an image where there is none.
    """
    weight = make_weights(layer, sparsity, dtype)["w"]
    record = {
        "layer": asdict(layer),
        "setting": {"sparsity": sparsity, "dtype": dtype, "architecture": target.name},
        "nonzeros": int(np.count_nonzero(weight)),
        "dense_bytes": weight.nbytes,
        "csr_bytes": encode(weight, layer.group).size_bytes,
    }
    found = make_layer(
        weight,
        strides=(layer.stride,) * len(layer.spatial),
        dilations=(1,) * len(layer.spatial),
        pads=(layer.pad,) * (2 * len(layer.spatial)),
        group=layer.group,
        element_type=weight.dtype,
        activation=_RELU,
        in_size=layer.spatial,
    )
    if isinstance(found, Refusal):
        return {**record, "refusal": found.reason}
    plan = choose_plan(found, target.architecture)
    if isinstance(plan, Refusal):
        return {**record, "refusal": plan.reason}
    return {**record, **_measure_image(found, plan, target)}


def _measure_image(layer: SparseLayer, plan: GeneratedPlan, target: Target) -> dict[str, Any]:
    started = time.process_time()
    programs = image_programs(StraightLineCode(), layer, plan, target)
    generated = time.process_time()
    verbose = [replace(program, options=(*program.options, "--ptxas-options=-v")) for program in programs]
    compiled = target.compile(verbose)
    done = time.process_time()
    code = compiled.cubin
    if target.nvfatbin is not None:
        code = target.nvfatbin.compress(code, target.architecture)
    packed = time.process_time()
    image = Image(target.architecture, target.min_driver, target.nvrtc.name, plan, code)
    return {
        "plan": str(plan),
        "cubin_bytes": len(compiled.cubin),
        "image_bytes": len(code),
        "container_bytes": len(pack([image])),
        # Of tiles that are linked, the assembler says only what they spill; this is what it was given.
        "registers": _largest(r"Used (\d+) registers", compiled.log) if len(programs) == 1 else plan.max_registers,
        "spill_bytes": _largest(r"(\d+) bytes spill stores", compiled.log),
        "generate_cpu_s": generated - started,
        "nvrtc_cpu_s": done - generated,
        "compress_cpu_s": packed - done,
    }


def _largest(pattern: str, log: str) -> int:
    """Of what the assembler says of each function."""
    return max(int(number) for number in re.findall(pattern, log))


def main() -> int:
    """Measure, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", default=[], help="only the layers of these names")
    parser.add_argument("--sparsity", nargs="*", type=float, default=[0.8, 0.9, 0.95])
    parser.add_argument("--dtype", nargs="*", default=["float32", "float16"], choices=["float32", "float16"])
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    (target,) = resolve_targets([options.target])
    results: dict[str, Any] = {
        **results_head(SCHEMA_VERSION),
        "environment": read_environment(),
        "tools": target.tools,
        "min_driver": target.min_driver,
        "layers": [],
    }
    layers = [layer for layer in choose_layers() if not options.layers or layer.name in options.layers]
    for layer, dtype, sparsity in itertools.product(layers, options.dtype, options.sparsity):
        record = measure_layer(layer, sparsity, dtype, target)
        results["layers"].append(record)
        write_text(options.output, to_json_text(results))
        sizes = ", ".join(f"{key} {value}" for key, value in record.items() if key.endswith(("_bytes", "_cpu_s")))
        print(f"{layer.name} {dtype} {sparsity:.0%}: {sizes}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
