"""What the GPU tests check, apart from where: on the CPU provider the same functions show that they work themselves."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
from onnx import AttributeProto

from onnx_sparseconv.converter import ConvertOptions, convert, gpu_images
from onnx_sparseconv.custom_ops.library import describe_kernels
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.kernels.image_container import parse
from onnx_sparseconv.kernels.plan import HALF_TERMS
from onnx_sparseconv.runtime.binding import BoundRuns, TensorSpec
from onnx_sparseconv.runtime.session import Provider, make_session, measuring_options
from tests.support.sparse_models import (
    NODE_NAME,
    activate,
    assert_within,
    convolve,
    make_model,
    max_pool,
    oracle,
    output_shape,
    random_inputs,
    whole_x,
)

HALF_ROUNDOFF = 2.0**-11
# Parts among which the tests may have a float16 sum divided.
MOST_PARTS = 8


@dataclass(frozen=True)
class Place:
    """Where a check runs."""

    provider: Provider = "cuda"
    device: int = 0

    def session(self, model, *, cuda_graph=False, **settings):
        """A session of a model; ``settings`` such as ``cuda_kernel="csr"`` are for the native library."""
        options = {"device_id": str(self.device)} if self.provider == "cuda" else {}
        if cuda_graph:
            options["enable_cuda_graph"] = "1"
        return make_session(
            model,
            provider=self.provider,
            session_options=measuring_options({f"sparseconv.{key}": str(value) for key, value in settings.items()}),
            provider_options=options,
        )


def with_images(model, *targets, nvrtc="auto", min_batch=0):
    """A converted model with generated kernels for some architectures, also where others are foretold to be faster; as
    it was where there are none for it. For calls of at least so many images."""
    with patch.object(gpu_images, "choose_kernels", lambda *_, **__: {}):
        converted, _ = convert(model, options=ConvertOptions(targets=targets, nvrtc=nvrtc))
    if converted is None:
        return model
    for node in gpu_images.sparse_nodes(converted).values() if min_batch else ():
        (image,) = parse(attributes_from_proto(node.proto).cuda_images.tobytes())
        gpu_images.put_image(node, dataclasses.replace(image, min_batch=min_batch))
    return converted


def image_bytes(model):
    """Bytes of the images in the nodes of a model."""
    return sum(
        len(attribute.t.raw_data)
        for node in model.graph.node
        for attribute in node.attribute
        if attribute.name == "cuda_images" and attribute.type == AttributeProto.TENSOR
    )


def kernel_of_newest_session():
    """What runs the node of the session that was made last."""
    return [record.kernel for record in describe_kernels() if record.node == NODE_NAME][-1]


def static_model(case, x_shape):
    """A model of the case with the sizes of X written down, but for the batch, and with the portable form."""
    model = make_model(case, x_shape=["N", *x_shape[1:]], with_function=True)
    for _ in x_shape:
        model.graph.output[0].type.tensor_type.shape.dim.add()
    return model


def assert_right(actual, case, inputs, kernel):
    """The output of a kernel lies within what rounding explains, element by element."""
    assert actual.dtype == case.dtype
    if case.dtype == np.float16 and "generated" in kernel:
        assert_right_with_half_sums(actual, case, inputs)
    else:
        # Where there are few tiles, blocks share one, and their sums are stored as halves.
        stored_sums = 1 if case.dtype == np.float16 and kernel in ("cuda.tensor", "cuda.segments", "cuda.wgmma") else 0
        is_rounded = case.dtype == np.float32 and kernel in (
            "cuda.tensor",
            "cuda.segments",
            "cuda.wgmma",
            "cuda.flat",
            "cuda.gemm",
            "cuda.cluster",
        )
        assert_within(actual, *oracle(case, inputs, stored_sums=stored_sums, has_rounded_factors=is_rounded))


def assert_right_with_half_sums(actual, case, inputs):
    """The same for a kernel that adds up `HALF_TERMS` products at a time in float16, and their sums in float16 too.

    Two bounds. Each element: every rounding of a partial sum is at most a roundoff of the sum of magnitudes. Each
    output channel: roundings are independent, so the root mean square of the error stays within a few roundoffs of
    that of the terms' own root sum of squares, and of what the sum begins with, once for each of those that are added
    to it; one forgotten weight is far above it.
    """
    pool, case = case.pool, dataclasses.replace(case, pool=None)
    exact, bound = oracle(case, inputs)
    x = whole_x(case, inputs)
    rows = (1, -1) + (1,) * (case.weight.ndim - 2)
    start = np.abs(inputs["B"].astype(np.float64).reshape(rows)) if case.has_bias else np.zeros(1)
    if case.has_residual:
        start = start + np.abs(inputs["Z"].astype(np.float64))
    magnitude = convolve(case, np.abs(case.weight), np.abs(x)) + start
    terms = int(np.count_nonzero(case.weight.reshape(case.out_channels, -1), axis=1).max())
    added = -(-terms // HALF_TERMS) + MOST_PARTS
    spread = np.sqrt(convolve(case, case.weight.astype(np.float64) ** 2, x.astype(np.float64) ** 2))
    _, lipschitz = activate(case, exact)
    bound = bound + 1.01 * lipschitz * (HALF_TERMS + added) * HALF_ROUNDOFF * magnitude + 2.0**-14
    if pool is not None:  # of maxima, the errors are no longer independent
        assert_within(actual, max_pool(pool, exact), max_pool(pool, bound))
        return
    assert_within(actual, exact, bound)
    axes = (0, *range(2, exact.ndim))
    error = np.sqrt(np.mean((actual.astype(np.float64) - exact) ** 2, axis=axes))
    own = np.sqrt(np.mean(np.abs(exact) ** 2, axis=axes))
    begun = np.sqrt(added * np.mean(np.broadcast_to(start, exact.shape) ** 2, axis=axes))
    summed = 6 * np.sqrt(np.mean(spread**2, axis=axes)) + begun
    allowed = HALF_ROUNDOFF * (lipschitz * summed + 2 * own) + 2.0**-14
    assert (error <= allowed).all(), f"channels {np.flatnonzero(error > allowed)}: {error.max()} of {allowed.max()}"


def check(place, case, x_shape, *, model=None, seed=0, **settings):
    """Run a case once and compare; returns the kernel that ran it."""
    session = place.session(make_model(case) if model is None else model, **settings)
    inputs = random_inputs(case, x_shape, seed)
    (actual,) = session.run(None, inputs)
    kernel = kernel_of_newest_session()
    assert_right(actual, case, inputs, kernel)
    return kernel


def check_graph(place, case, x_shape, *, model=None, replays=3, cuda_graph=True, **settings):
    """Capture, replay on the same inputs, replay on others: a graph reads its inputs anew every time."""
    session = place.session(make_model(case) if model is None else model, cuda_graph=cuda_graph, **settings)
    first, second = (random_inputs(case, x_shape, seed) for seed in (0, 1))
    spec = {"Y": TensorSpec(output_shape(case, x_shape), case.dtype)}
    runs = BoundRuns(
        session, "m", first, spec, place.provider, device_index=place.device, copies=2, cuda_graph=cuda_graph
    )
    results = []
    for inputs in (first, second):
        runs.update(inputs)
        for _ in range(replays * runs.num_copies):
            runs()
            results.append(runs.outputs()["Y"])
            assert_right(results[-1], case, inputs, kernel_of_newest_session())
    half = len(results) // 2
    assert len({result.tobytes() for result in results[:half]}) == 1
    assert len({result.tobytes() for result in results[half:]}) == 1
    return kernel_of_newest_session()


def check_threads(session, case, shapes, *, threads=8, rounds=2):
    """Concurrent runs of one session with changing shapes give, bit by bit, what runs one after the other give."""
    inputs = [random_inputs(case, shape, seed) for seed, shape in enumerate(shapes)]
    kernel = kernel_of_newest_session()
    wanted = []
    for fed in inputs:
        (result,) = session.run(None, fed)
        assert_right(result, case, fed, kernel)
        wanted.append(result.tobytes())

    def run(worker):
        order = np.random.default_rng(worker).permutation(len(inputs) * rounds) % len(inputs)
        return all(session.run(None, inputs[i])[0].tobytes() == wanted[i] for i in order)

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(run, range(threads)))
