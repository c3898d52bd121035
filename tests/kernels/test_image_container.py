"""The container of GPU images: round trips, what must be refused, and that C++ sees the same layout."""

from __future__ import annotations

import dataclasses
import shutil
import struct
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_sparseconv.errors import FormatError
from onnx_sparseconv.kernels import image_container
from onnx_sparseconv.kernels.image_container import (
    CONTAINER_FIELDS,
    CONTAINER_HEADER_BYTES,
    IMAGE_FIELDS,
    IMAGE_HEADER_BYTES,
    MAX_BATCH,
    PLAN_FIELDS,
    Image,
    pack,
    parse,
)
from tests.support.gpu_images import CUDA_SOURCES, make_image, make_plan

ARCHITECTURE_AT = CONTAINER_HEADER_BYTES


@st.composite
def images(draw):
    architectures = draw(st.lists(st.integers(10, 999), unique=True, max_size=5))
    text = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=31)
    return [
        Image(
            a,
            draw(st.integers(0, 2**32 - 1)),
            draw(text),
            make_plan(draw(st.integers(0, 99))),
            draw(code()),
            draw(st.integers(0, MAX_BATCH)),
        )
        for a in architectures
    ]


def code():
    return st.binary(min_size=1, max_size=70)


@given(images())
def test_what_was_packed_is_read_again(some):
    data = pack(some)
    assert parse(data) == tuple(some)
    assert pack(parse(data)) == data


def test_no_image_is_no_byte():
    assert pack([]) == b""
    assert parse(b"") == ()


def test_images_lie_at_multiples_of_16():
    data = pack([make_image(80, b"a" * 5), make_image(90, b"b" * 33)])
    for marker in (b"aaaaa", b"b" * 33):
        assert data.index(marker) % 16 == 0


def test_an_image_that_cannot_be_written_is_refused():
    good = make_image(90)
    for change in (
        {"code": b""},
        {"compiler": "x" * 32},
        {"compiler": "NVRTC\n"},
        {"architecture": 0},
        {"min_driver": -1},
        {"min_driver": 2**32},
        {"plan": dataclasses.replace(make_plan(), in_channels=2**31)},
    ):
        with pytest.raises(FormatError):
            pack([dataclasses.replace(good, **change)])
    with pytest.raises(FormatError, match="one architecture"):
        pack([good, good])


def _with(data, at, layout, value):
    changed = bytearray(data)
    struct.pack_into(layout, changed, at, value)
    return bytes(changed)


@pytest.mark.parametrize(
    ("at", "layout", "value", "message"),
    [
        (0, "<I", 0, "not in a container"),
        (4, "<I", 4, "of version 4"),
        (8, "<I", 0, "cannot hold 0"),
        (8, "<I", 2**32 - 1, "cannot hold"),
        (8, "<I", 1, "lies at"),
        (12, "<I", IMAGE_HEADER_BYTES + 8, "headers of"),
        (ARCHITECTURE_AT, "<I", 90, "one architecture"),
        (ARCHITECTURE_AT, "<I", 2**32 - 1, "no GPU architecture"),
        (ARCHITECTURE_AT + 8, "<Q", 0, "lies at 0"),
        (ARCHITECTURE_AT + 8, "<Q", 2**64 - 16, "lies at"),
        (ARCHITECTURE_AT + 16, "<Q", 0, "0 bytes long"),
        (ARCHITECTURE_AT + 16, "<Q", 2**64 - 1, "lies at"),
        (ARCHITECTURE_AT + 24, "<I", 1, "damaged"),
        (ARCHITECTURE_AT + 28, "<I", 2**31, "bad header"),
        (ARCHITECTURE_AT + 32, "<32s", b"x" * 32, "bad header"),
        (ARCHITECTURE_AT + 32, "<32s", b"a\0b", "bad header"),
    ],
)
def test_a_container_that_contradicts_itself_is_refused(at, layout, value, message):
    data = pack([make_image(80), make_image(90)])
    with pytest.raises(FormatError, match=message):
        parse(_with(data, at, layout, value))


def test_a_container_that_is_cut_off_or_too_long_is_refused():
    data = pack([make_image(80), make_image(90)])
    for length in range(1, len(data)):
        with pytest.raises(FormatError):
            parse(data[:length])
    with pytest.raises(FormatError, match="follow the last"):
        parse(data + b"\0")


@settings(max_examples=200)
@given(st.data())
def test_hostile_bytes_are_read_or_refused(data):
    container = bytearray(pack([make_image(80, b"code of one"), make_image(90, b"code of the other")]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(container) - 1))
        container[at] = data.draw(st.integers(0, 255))
    try:
        found = parse(bytes(container))
    except FormatError:
        return
    # What is accepted is whole: it comes back as it is, but for what is between the images.
    assert parse(pack(found)) == found


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data):
    for candidate in (data, struct.pack("<IIII", image_container.MAGIC, 1, 1, IMAGE_HEADER_BYTES) + data):
        try:
            parse(candidate)
        except FormatError:
            continue


def test_cpp_has_the_same_layout(tmp_path):
    """Compile the header that the native library reads containers with, and ask it where everything lies."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    structs = {"ContainerHeader": CONTAINER_FIELDS, "ImageHeader": IMAGE_FIELDS, "GeneratedPlan": PLAN_FIELDS}
    prints = "".join(
        f'std::printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof({name}::{field}));'
        for name, fields in structs.items()
        for field, _ in fields
    )
    sizes = "".join(f'std::printf("{name} %zu 0\\n", sizeof({name}));' for name in structs)
    constants = 'std::printf("constants %u %u\\n", kContainerMagic, kContainerVersion);'
    source = tmp_path / "layout.cc"
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n#include <image_format.h>\nusing namespace sparseconv::cuda;\n"
        f"int main() {{ {prints} {sizes} {constants}"
        ' std::printf("ImageHeader.plan %zu 0\\n", offsetof(ImageHeader, plan)); }\n'
    )
    program = tmp_path / "layout"
    subprocess.run([compiler, "-std=c++17", "-I", str(CUDA_SOURCES), str(source), "-o", str(program)], check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    found = {name: (int(a), int(b)) for name, a, b in (line.split() for line in lines)}
    wanted = {"constants": (image_container.MAGIC, image_container.VERSION)}
    for name, fields in structs.items():
        at = 0
        for field, layout in fields:
            wanted[f"{name}.{field}"] = (at, struct.calcsize(f"<{layout}"))
            at += struct.calcsize(f"<{layout}")
        wanted[name] = (at, 0)
    wanted["ImageHeader.plan"] = (wanted["ImageHeader"][0], 0)
    wanted["ContainerHeader"] = (CONTAINER_HEADER_BYTES, 0)
    wanted["ImageHeader"] = (IMAGE_HEADER_BYTES, 0)
    assert found == wanted
