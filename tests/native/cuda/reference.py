"""Models whose node carries images that `reference_image.cc` makes: any plan, any weight."""

from __future__ import annotations

import dataclasses
import functools
import struct
from pathlib import Path

import numpy as np

from onnx_sparseconv.kernels.image_container import PLAN_FIELDS, GeneratedPlan, Image, pack
from onnx_sparseconv.kernels.plan import MAX_SOURCES
from tests.support.cuda_emulation import build_shared
from tests.support.sparse_models import make_model

_SOURCE = Path(__file__).with_name("reference_image.cc")
_MAGIC = b"reference-image\0"
_MAX_WEIGHTS = 1 << 14
ZERO_BYTES = 144  # kGeneratedZeroBytes of params.h


@functools.cache
def compiled() -> bytes:
    """The shared object, with room for a plan and a weight."""
    return build_shared("reference_image.so", [_SOURCE], "-O2", "-s", "-fno-gnu-unique").read_bytes()


def code_for(plan: GeneratedPlan, weight: np.ndarray) -> bytes:
    """An image of a plan and a dense weight ``(K, C / group, R, S)``."""
    assert weight.size <= _MAX_WEIGHTS
    values = [getattr(plan, name) for name, _ in PLAN_FIELDS]
    flat = [number for value in values for number in (value if isinstance(value, tuple) else (value,))]
    data = struct.pack(f"<{len(flat)}i", *flat) + weight.astype(np.float32).tobytes()
    code = bytearray(compiled())
    begin = code.index(_MAGIC) + len(_MAGIC)
    code[begin : begin + len(data)] = data
    return bytes(code)


def make_plan(case, **changes) -> GeneratedPlan:
    """A plan of a 1-D or 2-D case, with modest sizes; ``changes`` replaces fields."""
    geometry, half = case.geometry, case.dtype == np.float16
    rank = len(geometry.kernel_shape)

    def pair(values, fill):
        return tuple(values[-2:]) if rank > 1 else (fill, values[0])

    pads = geometry.pads[:rank] if geometry.pads else (0,) * rank
    plan = GeneratedPlan(
        element_type=10 if half else 1,
        in_channels=case.in_channels,
        out_channels=case.out_channels,
        group=geometry.group,
        tile_in_channels=case.in_channels,
        kernel_shape=pair(geometry.kernel_shape, 1),
        strides=pair(geometry.strides, 1),
        dilations=pair(geometry.dilations, 1),
        pads_begin=pair(pads, 0),
        activation=int(case.activation),
        is_pointwise=0,
        tile_channels=min(4, case.out_channels),
        num_tiles=0,
        chunk_channels=min(4, case.in_channels),
        num_chunks=0,
        columns_per_slot=2 if half else 1,
        threads=64,
        staging_threads=32,
        num_stages=2,
        channel_pitch=4096,
        plane_residue=0,
        image_pitch=0,
        stage_images=0,
        min_passes=1,
        code_bytes=1000,
        source_channels=(0,) * MAX_SOURCES,
    )
    plan = dataclasses.replace(plan, **changes)
    return dataclasses.replace(
        plan,
        num_tiles=changes.get("num_tiles", -(-plan.out_channels // plan.tile_channels)),
        num_chunks=changes.get("num_chunks", -(-plan.tile_in_channels // plan.chunk_channels)),
    )


def make_image(case, architecture=90, min_driver=12000, **changes) -> Image:
    """An image for a case; ``changes`` replaces fields of its plan."""
    plan = make_plan(case, **changes)
    weight = case.weight if case.weight.ndim == 4 else case.weight[:, :, None]
    return Image(architecture, min_driver, "NVRTC 12.9", plan, code_for(plan, weight))


def model_with(case, container: bytes):
    """The case's model with these bytes as ``cuda_images``."""
    return make_model(case, {**case.attributes(), "cuda_images": np.frombuffer(container, np.uint8)})


def model_with_image(case, **changes):
    """The case's model with one image for sm_90."""
    return model_with(case, pack([make_image(case, **changes)]))
