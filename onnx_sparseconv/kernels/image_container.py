"""The container of GPU kernel images in the node attribute ``cuda_images``.

The format is that of ``cuda/image_format.h``, which the native library reads it with: a header, one header an image,
then the images, each at a multiple of 16 bytes; little endian. No byte at all stands for no image.

What is read here may come from anyone's model, so `parse` checks everything that it relies on.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnx_sparseconv.errors import FormatError
from onnx_sparseconv.kernels.plan import GeneratedPlan

MAGIC = 0x4D494353  # "SCIM"
VERSION = 3
ALIGNMENT = 16
# More than there are architectures; a hostile count is refused before anything is allocated.
MAX_IMAGES = 64
# Of the images of a call: kernels count them as int.
MAX_BATCH = 2**31 - 1
_COMPILER_BYTES = 32
_LONG_LONG = 8

# Members of the structs in their order: name and struct code. The plan's follow from its dataclass, which mirrors
# GeneratedPlan of cuda/params.h: all of it is int, or tuples of int.
CONTAINER_FIELDS = (("magic", "I"), ("version", "I"), ("num_images", "I"), ("header_bytes", "I"))
IMAGE_FIELDS = (
    ("architecture", "I"),
    ("min_driver", "I"),
    ("offset", "Q"),
    ("size", "Q"),
    ("checksum", "I"),
    ("min_batch", "I"),
    ("compiler", f"{_COMPILER_BYTES}s"),
)
PLAN_FIELDS = tuple((f.name, "i" * str(f.type).count("int")) for f in dataclasses.fields(GeneratedPlan))

_CONTAINER = struct.Struct("<" + "".join(code for _, code in CONTAINER_FIELDS))
_PLAN = struct.Struct("<" + "".join(code for _, code in PLAN_FIELDS))
_IMAGE = struct.Struct("<" + "".join(code for _, code in IMAGE_FIELDS))
# A struct with a `long long` has a size that is a multiple of 8.
IMAGE_HEADER_BYTES = -(-(_IMAGE.size + _PLAN.size) // _LONG_LONG) * _LONG_LONG
CONTAINER_HEADER_BYTES = _CONTAINER.size


@dataclass(frozen=True)
class Image:
    """One GPU kernel image.

    Attributes:
        architecture: 75, 80, 90, ..: it runs on GPUs of this major number and at least this minor one.
        min_driver: the oldest driver that loads it, as cuDriverGetVersion counts: 12090 is CUDA 12.9.
        compiler: what made it, ``NVRTC 12.9``; at most 31 printable ASCII characters.
        plan: what its code was made for, and how to launch it.
        code: the cubin, or a fat binary that holds it compressed; the driver takes either.
        min_batch: images in a call from which on it is the fastest kernel of its node; with fewer, one of the library's
            own runs.
    """

    architecture: int
    min_driver: int
    compiler: str
    plan: GeneratedPlan
    code: bytes
    min_batch: int = 0


def pack(images: Sequence[Image]) -> bytes:
    """The container of some images; empty for none.

    Raises:
        FormatError: an image is empty, two are for one architecture, or a value does not fit its field.
    """
    if not images:
        return b""
    _check_architectures([image.architecture for image in images])
    offset = CONTAINER_HEADER_BYTES + len(images) * IMAGE_HEADER_BYTES
    headers = [_CONTAINER.pack(MAGIC, VERSION, len(images), IMAGE_HEADER_BYTES)]
    codes = []
    for image in images:
        padding = -offset % ALIGNMENT
        offset += padding
        headers.append(_pack_header(image, offset))
        codes.append(bytes(padding) + image.code)
        offset += len(image.code)
    return b"".join(headers + codes)


def parse(data: bytes) -> tuple[Image, ...]:
    """Read a container; the inverse of `pack`.

    Raises:
        FormatError: it is cut off, of another version, or contradicts itself; says where.
    """
    if not data:
        return ()
    if len(data) < CONTAINER_HEADER_BYTES:
        raise FormatError(f"a container of GPU images cannot have {len(data)} bytes")
    magic, version, num_images, header_bytes = _CONTAINER.unpack_from(data)
    if magic != MAGIC:
        raise FormatError("the GPU images are not in a container of this package")
    if (version, header_bytes) != (VERSION, IMAGE_HEADER_BYTES):
        raise FormatError(
            f"the container of GPU images is of version {version} with headers of {header_bytes} bytes; this package "
            f"reads version {VERSION} with {IMAGE_HEADER_BYTES}"
        )
    begin = CONTAINER_HEADER_BYTES + num_images * IMAGE_HEADER_BYTES
    if not 1 <= num_images <= MAX_IMAGES or begin > len(data):
        raise FormatError(f"a container of {len(data)} bytes cannot hold {num_images} GPU images")
    images = []
    for index in range(num_images):
        image, begin = _parse_image(data, index, begin)
        images.append(image)
    if begin != len(data):
        raise FormatError(f"{len(data) - begin} bytes follow the last GPU image")
    _check_architectures([image.architecture for image in images])
    return tuple(images)


def _pack_header(image: Image, offset: int) -> bytes:
    name = image.compiler.encode("ascii", errors="replace")
    if not image.code:
        raise FormatError(f"the GPU image for architecture {image.architecture} is empty")
    if len(name) >= _COMPILER_BYTES or not _is_printable(name):
        raise FormatError(f"the name of a compiler must be at most {_COMPILER_BYTES - 1} characters, got {name!r}")
    if not 0 <= image.min_batch <= MAX_BATCH:
        raise FormatError(f"a GPU image cannot be for calls of at least {image.min_batch} images")
    values: list[int] = []
    for field, code in PLAN_FIELDS:
        value: Any = getattr(image.plan, field)
        values.extend((value,) if len(code) == 1 else value)
    try:
        place = (offset, len(image.code), zlib.crc32(image.code))
        header = _IMAGE.pack(image.architecture, image.min_driver, *place, image.min_batch, name)
        return (header + _PLAN.pack(*values)).ljust(IMAGE_HEADER_BYTES, b"\0")
    except struct.error as error:
        raise FormatError(f"the GPU image for architecture {image.architecture}: {error}") from error


def _parse_image(data: bytes, index: int, begin: int) -> tuple[Image, int]:
    """Image number ``index``, whose code comes after ``begin``, and where its code ends."""
    at = CONTAINER_HEADER_BYTES + index * IMAGE_HEADER_BYTES
    architecture, min_driver, offset, size, checksum, min_batch, name = _IMAGE.unpack_from(data, at)
    where = f"GPU image {index} (architecture {architecture})"
    if offset % ALIGNMENT or not begin <= offset < begin + ALIGNMENT or not 1 <= size <= len(data) - offset:
        raise FormatError(f"{where} lies at {offset}, {size} bytes long, in a container of {len(data)} bytes")
    if min_batch > MAX_BATCH or not name.endswith(b"\0") or not _is_printable(name.rstrip(b"\0")):
        raise FormatError(f"{where} has a bad header")
    code = bytes(data[offset : offset + size])
    if zlib.crc32(code) != checksum:
        raise FormatError(f"{where} is damaged: its checksum does not fit")
    plan = _parse_plan(data, at + _IMAGE.size, where)
    return Image(architecture, min_driver, name.rstrip(b"\0").decode(), plan, code, min_batch), offset + size


def _parse_plan(data: bytes, at: int, where: str) -> GeneratedPlan:
    values = iter(_PLAN.unpack_from(data, at))
    arguments: dict[str, Any] = {}
    for field, code in PLAN_FIELDS:
        numbers = tuple(next(values) for _ in code)
        arguments[field] = numbers if len(code) > 1 else numbers[0]
    try:
        return GeneratedPlan(**arguments)
    except ValueError as error:
        raise FormatError(f"{where} has a plan that cannot be: {error}") from error


def _check_architectures(architectures: Sequence[int]) -> None:
    """Each is a plausible number, and none comes twice: a reader could not choose."""
    bad = [a for a in architectures if not 10 <= a <= 999]
    if bad:
        raise FormatError(f"there is no GPU architecture {bad[0]}")
    if len(set(architectures)) < len(architectures):
        raise FormatError(f"several GPU images are for one architecture: {sorted(architectures)}")
    if len(architectures) > MAX_IMAGES:
        raise FormatError(f"{len(architectures)} GPU images are more than the {MAX_IMAGES} that a node may carry")


def _is_printable(name: bytes) -> bool:
    return all(32 <= byte < 127 for byte in name)
