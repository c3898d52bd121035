r"""Times what layers take inside whole networks on a GPU, dense and sparse, and writes it as JSON.

    python benchmarks/network_kernels.py resnet18.onnx mobilenet_v2.onnx --precision fp16 --batch 8 64 \
        -o build/network-kernels.json

A layer alone, run again and again, finds its code and often its input in caches, and a dense one has its layout
changed for it; inside a network that is not so. The profiler of PyTorch says what each kernel of a run took, in their
order, and ONNX Runtime's own that of the layers. To a dense layer belong its convolution, the addition of its bias and
its activation, with the channels last; to a sparse one all that it launches. Pools and the additions of residuals stay
out, except those that sparse layers do in passing, which are marked. Every layer is made sparse, and run by code of its
own, where code can be made for it, and by the library's kernels.

Some kernels begin before the ones in front of them are done (programmatic dependent launch: the library's, on sm_90),
and wait. So a kernel takes the time from where the one in front of it ended, or from its own begin, if that is later.
Needs PyTorch with CUDA, on a GPU of sm_90.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from network_parts import Kernel, by_layer, dense_groups, executed_convolutions, sizes_of, sparse_groups
from onnx import ModelProto
from results_head import results_head
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnx_sparseconv.converter.conv_sites import ConvSite, find_conv_sites, output_sizes
from onnx_sparseconv.converter.conversion import ConvertOptions, Precision, convert
from onnx_sparseconv.converter.decisions import Cause, Choice, Decisions, LayerDecision
from onnx_sparseconv.converter.gpu_images import node_keys
from onnx_sparseconv.converter.model_io import load
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.files import write_text
from onnx_sparseconv.kernels.kernel_choice import CSR, KernelChoice
from onnx_sparseconv.runtime.binding import BoundRuns, specs_of
from onnx_sparseconv.runtime.cuda_mode import CudaMode
from onnx_sparseconv.runtime.environment import read_environment
from onnx_sparseconv.runtime.inputs import make_random_inputs, model_inputs, resolve_shapes
from onnx_sparseconv.runtime.layer_times import read_events
from onnx_sparseconv.runtime.plain import to_json_text, to_plain
from onnx_sparseconv.runtime.run import run_session
from onnx_sparseconv.runtime.session import make_session, measuring_options

SCHEMA_VERSION = 1
WARM_UP, RUNS = 20, 20
TARGET = "sm_90"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="pruned models, dense")
    parser.add_argument("--precision", nargs="+", choices=["keep", "fp16"], default=["keep"])
    parser.add_argument("--batch", nargs="+", type=int, default=[64], help="images")
    parser.add_argument("--kernels", nargs="+", choices=["generated", "library"], default=["generated", "library"])
    parser.add_argument(
        "--library-only", nargs="*", type=Path, default=[], metavar="MODEL", help="of these, none by generated code"
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args()


def profile_model(
    path: Path, batch: int, *, prefer_nhwc: bool
) -> tuple[list[tuple[str, Mapping[str, Any]]], list[Kernel]]:
    """The convolutions of one run in their order, and its kernels, each with its mean time.

    Raises:
        ValueError: runs differ in their kernels.
    """
    provider_options = CudaMode(prefer_nhwc=prefer_nhwc).provider_options()
    with tempfile.TemporaryDirectory() as folder:
        session = make_session(
            path,
            provider="cuda",
            session_options=measuring_options(),
            provider_options=provider_options,
            profile=Path(folder) / "profile",
        )
        wanted = model_inputs(session)
        inputs = make_random_inputs(wanted, resolve_shapes(wanted, {}, batch))
        outputs = run_session(session, inputs, path.name)
        layers = executed_convolutions(read_events(session.end_profiling()))
    run = BoundRuns(session, path.name, inputs, specs_of(outputs), "cuda")
    for _ in range(WARM_UP):
        run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(RUNS):
            run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    names = np.array([event.name for event in events])
    begins, ends = (np.array([getattr(event.time_range, what) for event in events]) for what in ("start", "end"))
    busy_from = np.maximum(begins, np.concatenate([begins[:1], np.maximum.accumulate(ends)[:-1]]))
    if len(events) % RUNS or np.any(names.reshape(RUNS, -1) != names[: len(events) // RUNS]):
        raise ValueError(f"{path.name}: runs differ in their kernels")
    times = np.maximum(ends - busy_from, 0.0).reshape(RUNS, -1).mean(axis=0)
    return layers, list(zip(names.tolist(), times.tolist(), strict=False))


def sites_of(path: Path) -> list[ConvSite]:
    """The convolutions of a model, in the order in which they run."""
    proto: ModelProto = load(path).proto
    return find_conv_sites(ModelView(proto), ShapeMap(proto))


def sizes_of_site(site: ConvSite, batch: int) -> tuple[tuple[int, ...], ...]:
    """As `network_parts.sizes_of`."""
    assert site.weight is not None
    assert site.geometry is not None
    assert site.input_shape is not None
    _, channels, *size = site.input_shape
    out_size = output_sizes(site.geometry, size)
    shapes = (batch, channels, *size), (batch, site.weight.values.shape[0], *out_size)
    return tuple(tuple(sorted(dim or 0 for dim in shape)) for shape in shapes)


def describe(site: ConvSite, kernels: Sequence[Kernel]) -> dict[str, Any]:
    """A layer, as `fit_gpu_rule.make_measured_layer` wants it, and what it took."""
    assert site.weight is not None
    assert site.geometry is not None
    assert site.input_shape is not None
    weight, geometry = site.weight.values, site.geometry
    return {
        "name": site.name,
        "out_channels": weight.shape[0],
        "in_channels": weight.shape[1] * geometry.group,
        "kernel": list(weight.shape[2:]),
        "stride": geometry.strides[0],
        "pad": geometry.pads[0],
        "group": geometry.group,
        "height": site.input_shape[2],
        "width": site.input_shape[3],
        "dtype": str(weight.dtype),
        "sparsity": round(1 - np.count_nonzero(weight) / weight.size, 4),
        "us": math.fsum(time_us for _, time_us in kernels),
        "kernels": [{"name": name, "us": time_us} for name, time_us in kernels],
    }


def convert_dense(model: Path, precision: Precision, folder: Path) -> Path:
    """The model itself, in a precision."""
    if precision == "keep":
        return model
    path = folder / f"{model.stem}.{precision}.onnx"
    convert(model, path, ConvertOptions(precision=precision, min_sparsity=1.0))
    return path


def convert_all(model: Path, precision: Precision, kernel: str, folder: Path) -> Path:
    """The model with every layer sparse, run by such kernels."""
    choice = CSR if kernel == "library" else KernelChoice("generated")
    layers = [
        LayerDecision(name, graph, number, Choice.SPARSE, Choice.SPARSE, Cause.MEASURED, "", kernels={TARGET: choice})
        for graph, name, number in node_keys(sites_of(model))
    ]
    decisions = Decisions(model.name, {}, (), tuple(layers), targets=(TARGET,))
    path = folder / f"{model.stem}.{precision}.{kernel}.onnx"
    # Dense layers are timed without the Concat in front of them.
    options = ConvertOptions(precision=precision, decisions=decisions, targets=(TARGET,), fuse_concats=False)
    convert(model, path, options)
    return path


def measure(original: Path, converted: Path, batch: int) -> list[dict[str, Any]]:
    """Both sides of all layers.

    Raises:
        ValueError: a layer stays dense, or others ran than the model has, in which all have names.
    """
    sites, converted_sites = sites_of(original), sites_of(converted)
    if not all(site.is_sparse for site in converted_sites):
        raise ValueError(f"{converted.name}: a layer stays dense")
    ran, kernels = profile_model(original, batch, prefer_nhwc=True)
    dense = by_layer(
        [sizes_of_site(site, batch) for site in sites], [sizes_of(event) for _, event in ran], dense_groups(kernels)
    )
    ran, kernels = profile_model(converted, batch, prefer_nhwc=False)
    sparse = by_layer([site.name for site in converted_sites], [name for name, _ in ran], sparse_groups(kernels))
    return [
        {"dense": describe(site, dense[i]), "sparse_us": math.fsum(t for _, t in sparse[i])}
        | {"sparse_kernels": [{"name": n, "us": t} for n, t in sparse[i]]}
        | {"adds_residual": converted_sites[i].node.op == "SparseConvAdd"}
        for i, site in enumerate(sites)
    ]


def main() -> int:
    """Measure what was asked for and write one file, anew after every network."""
    asked = parse_arguments()
    networks: list[dict[str, Any]] = []
    results: dict[str, Any] = {
        **results_head(SCHEMA_VERSION),
        "environment": {**to_plain(read_environment()), "torch": torch.__version__},
        "networks": networks,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [
            *itertools.product(asked.models, asked.kernels),
            *((model, "library") for model in asked.library_only),
        ]
        for (model, kernel), precision in itertools.product(models, asked.precision):
            dense, converted = convert_dense(model, precision, folder), convert_all(model, precision, kernel, folder)
            for batch in asked.batch:
                setting = {"original": model.name, "precision": precision, "kernels": kernel, "batch": batch}
                layers = measure(dense, converted, batch)
                networks.append({**setting, "layers": layers})
                write_text(asked.output, to_json_text(results))
                dense_us = math.fsum(one["dense"]["us"] for one in layers)
                sparse_us = math.fsum(one["sparse_us"] for one in layers)
                print(f"{setting}: layers take {dense_us:.0f} us dense, {sparse_us:.0f} us sparse", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
