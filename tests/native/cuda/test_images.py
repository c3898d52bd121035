"""`cuda_images`: what is damaged or another node's is refused with one line; of the rest, the right image is chosen."""

from __future__ import annotations

import dataclasses
import os
import struct
import zlib

import numpy as np
import pytest
from onnx import helper

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from onnx_sparseconv.kernels import fatbin, nvrtc
from onnx_sparseconv.kernels.image_container import CONTAINER_HEADER_BYTES, IMAGE_FIELDS, PLAN_FIELDS, pack
from onnx_sparseconv.kernels.plan import MAX_SOURCES
from tests.native.cuda.reference import make_image, model_with
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    geometry_2d,
    make_model,
    oracle,
    random_inputs,
    random_weight,
)

# Of fewer rows than warpgroups take.
CASE = SparseConvCase(random_weight((7, 6, 3, 3), 0.4), geometry_2d(3, 2, 1), Activation.RELU)
SHAPE = (2, 6, 8, 8)
REFUSED = " node 'conv1': attribute 'cuda_images' "


def container(case=CASE, **changes):
    return pack([make_image(case, **changes)])


def field_offset(name):
    """Where a field of the first image's header lies in the container."""
    offset = CONTAINER_HEADER_BYTES
    for field, code in (*IMAGE_FIELDS, *PLAN_FIELDS):
        if field == name:
            return offset
        offset += struct.calcsize(f"<{code}")
    raise AssertionError(name)


def overwritten(data, offset, code, *values):
    changed = bytearray(data)
    struct.pack_into(f"<{code}", changed, offset, *values)
    return bytes(changed)


def check_refused(make_session, data, cause="", case=CASE):
    with pytest.raises(Exception, match="conv1") as caught:
        make_session(model_with(case, data))
    message = str(caught.value)
    assert REFUSED in message
    assert cause in message
    assert "\n" not in message.strip()
    assert message.isascii()


def run_and_check(session, case=CASE, x_shape=SHAPE):
    inputs = random_inputs(case, x_shape)
    (actual,) = session.run(None, inputs)
    assert_within(actual, *oracle(case, inputs))


def kernel_of(session):
    run_and_check(session)
    (record,) = library.describe_kernels()
    return record.kernel


def test_every_truncation_is_refused(make_session):
    data = container()
    headers = range(1, field_offset("code_bytes") + 16)
    for size in (*headers, *range(len(data) - 70, len(data)), *range(1000, len(data), 5000)):
        check_refused(make_session, data[:size])


@pytest.mark.parametrize(("min_batch", "runs"), [(0, True), (2, True), (3, False), (2**31 - 1, False)])
def test_an_image_runs_from_so_many_images_on(make_session, capfd, min_batch, runs):
    """With fewer, the library's own kernel is the faster one; that is no reason to warn of."""
    data = pack([dataclasses.replace(make_image(CASE), min_batch=min_batch)])
    session = make_session(model_with(CASE, data), severity=2)
    assert kernel_of(session) == ("cuda.generated(sm_90)" if runs else "cuda.csr")
    assert "conv1" not in "".join(capfd.readouterr())


def test_an_image_that_is_asked_for_runs_with_any_number_of_images(make_session):
    data = pack([dataclasses.replace(make_image(CASE), min_batch=3)])
    assert kernel_of(make_session(model_with(CASE, data), cuda_kernel="generated")) == "cuda.generated(sm_90)"


def test_the_table_starts_from_a_good_container(make_session):
    assert kernel_of(make_session(model_with(CASE, container()))) == "cuda.generated(sm_90)"


BIG = 2**31 - 1
CONTAINER_FIELD_NAMES = ("magic", "version", "num_images", "header_bytes")
HOSTILE = [
    *(
        (name, "I", value, "")
        for name in ("magic", "version", "num_images", "header_bytes")
        for value in (0, 9, 2**32 - 1)
    ),
    *(("architecture", "I", value, "that there is not") for value in (0, 9, 1000, 2**32 - 1)),
    *(("offset", "Q", value, "beyond its place") for value in (0, 8, 16, 168, 2**63, 2**64 - 16, 2**64 - 1)),
    *(("size", "Q", value, "beyond its place") for value in (0, 2**63, 2**64 - 1)),
    ("size", "Q", 100, "checksum is wrong"),
    ("checksum", "I", 0, "checksum is wrong"),
    *(("min_batch", "I", value, "damaged header") for value in (2**31, 2**32 - 1)),
    ("compiler", "32s", b"x" * 32, "damaged header"),
    ("compiler", "32s", b"NVRTC\n12", "damaged header"),
    ("compiler", "32s", b"\xff", "damaged header"),
    *((name, "i", value, name) for name in ("in_channels", "out_channels", "group") for value in (0, 5, -1, BIG)),
    *((name, "ii", (value, 2), name) for name in ("kernel_shape", "strides") for value in (0, 1, -1, BIG)),
    *(("dilations", "ii", (value, 1), "dilations") for value in (0, 2, -1, BIG)),
    *(("pads_begin", "ii", (1, value), "pads_begin") for value in (0, 2, -1, BIG)),
    ("element_type", "i", 0, "element_type"),
    ("element_type", "i", 11, "element_type"),
    ("activation", "i", 0, "activation"),
    ("activation", "i", 99, "activation"),
    ("is_pointwise", "i", 1, "is_pointwise"),
    ("is_pointwise", "i", 2, "is_pointwise"),
    *(("tile_channels", "i", value, "") for value in (0, -1, 3, 9, BIG)),
    *(("num_tiles", "i", value, "num_tiles") for value in (0, 1, 3, -1, BIG)),
    *(("tile_in_channels", "i", value, "") for value in (0, 7, -1, BIG)),
    *(("chunk_channels", "i", value, "") for value in (0, 2, 7, -1, BIG)),
    *(("num_chunks", "i", value, "num_chunks") for value in (0, 1, 3, -1, BIG)),
    *(("columns_per_slot", "i", value, "columns_per_slot") for value in (0, 2, -1)),
    *(("threads", "i", value, "threads") for value in (0, 31, 33, 1056, -32, BIG)),
    *(("staging_threads", "i", value, "staging_threads") for value in (-32, -1, 1, 31, 33, 64, BIG)),
    *(("min_passes", "i", value, "min_passes") for value in (0, -1, 3, BIG)),
    *(("num_stages", "i", value, "num_stages") for value in (0, -1, 65, BIG)),
    *(("channel_pitch", "i", value, "channel_pitch") for value in (0, 16, 4097, -16, BIG, 2**31 - 16)),
    *(("image_pitch", "i", value, "") for value in (-16, 8, 16, 4096, BIG)),
    *(("stage_images", "i", value, "stage_images") for value in (-1, 1, BIG)),
    *(("plane_residue", "i", value, "plane_residue") for value in (-1, 4, BIG)),
    ("code_bytes", "i", -1, "code_bytes"),
    *(("source_channels", "iii", value, "source_channels") for value in ((6, 0, 0), (2, 4, 0), (0, 0, 6), (-1, 7, 0))),
]


CONCATENATED = SparseConvCase(random_weight((7, 6, 1, 1), 0.4), geometry_2d(1, pad=0), input_channels=(2, 4))


def sources_of(*channels):
    """The plan's `source_channels`."""
    return (*channels, *(0,) * (MAX_SOURCES - len(channels)))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"source_channels": sources_of(4, 2)}, "source_channels is 4"),
        ({"source_channels": sources_of(6)}, "source_channels is 6"),
        ({"source_channels": sources_of(2, 3, 1)}, "source_channels is 3"),
        ({"source_channels": sources_of(2, 4), "is_pointwise": 0}, "is_pointwise is 0"),
        ({"source_channels": sources_of(2, 4), "plane_residue": 1}, "plane_residue is 1"),
        ({"image_pitch": 4096, "stage_images": 1, "channel_pitch": 20}, "channel_pitch is 20"),
    ],
    ids=str,
)
def test_an_image_for_other_inputs_is_refused(make_session, changes, cause):
    fitting = {"is_pointwise": 1, "source_channels": sources_of(2, 4)}
    check_refused(make_session, container(CONCATENATED, **{**fitting, **changes}), cause, CONCATENATED)
    for channels in ((), (2, 4)):
        data = container(CONCATENATED, is_pointwise=1, source_channels=sources_of(*channels))
        make_session(model_with(CONCATENATED, data), cuda_kernel="generated")


@pytest.mark.parametrize(("name", "code", "value", "cause"), HOSTILE, ids=[f"{n}-{v}" for n, _, v, _ in HOSTILE])
def test_a_bad_field_is_refused(make_session, name, code, value, cause):
    is_first = name in CONTAINER_FIELD_NAMES
    offset = 4 * CONTAINER_FIELD_NAMES.index(name) if is_first else field_offset(name)
    values = value if isinstance(value, tuple) else (value,)
    check_refused(make_session, overwritten(container(), offset, code, *values), cause)


def test_staging_threads_beyond_the_largest_block_are_refused(make_session):
    assert kernel_of(make_session(model_with(CASE, container(threads=992)))) == "cuda.generated(sm_90)"
    check_refused(make_session, container(threads=1024), "staging_threads is 32")
    assert kernel_of(make_session(model_with(CASE, container(threads=1024, staging_threads=0)))).startswith("cuda.gen")


def test_any_changed_byte_of_an_image_is_refused(make_session):
    data = container()
    begin = struct.unpack_from("<Q", data, field_offset("offset"))[0]
    for at in (begin, begin + 40, len(data) - 1):
        check_refused(make_session, overwritten(data, at, "B", data[at] ^ 1), "checksum is wrong")


def test_random_headers_never_crash(make_session):
    """Each is refused, or runs, or its launch fails; what fits the node by chance is launched as it says."""
    rng = np.random.default_rng(0)
    good, end = container(), field_offset("code_bytes") + 4
    refused = 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            at = 4 * int(rng.integers(end // 4))
            value = int(rng.choice([0, 1, 2, 3, 8, 31, 64, 4096, BIG, 2**31, 2**32 - 1, int(rng.integers(2**32))]))
            struct.pack_into("<I", data, at, value)
        message = what_happens(make_session, bytes(data))
        refused += REFUSED in message
        assert not message or "SparseConv node 'conv1': " in message
    assert 150 < refused < 300


def what_happens(make_session, data):
    """The message with which a session or its run refuses; empty where the run gives the right outputs."""
    inputs = random_inputs(CASE, SHAPE)
    try:
        (actual,) = make_session(model_with(CASE, data)).run(None, inputs)
    except Exception as error:
        return str(error)
    assert_within(actual, *oracle(CASE, inputs))
    return ""


def elf(section_table, section_bytes, num_sections, *, following=0):
    """The header of a binary, and zeros."""
    start = b"\x7fELF\x02\x01" + bytes(34) + struct.pack("<Q", section_table) + bytes(10)
    return start + struct.pack("<HH", section_bytes, num_sections) + bytes(2 + following)


def fat_binary(*entries, bytes_of_all=None, cut=0):
    """A fat binary of zeros. Each entry: what it says of the bytes of its header, and of its code."""
    data = b""
    for header, code in entries:
        entry = struct.pack("<HHIQ", 2, 257, header, code)
        data += entry + bytes(max(0, min(header + code, 1000) - len(entry)))
    if bytes_of_all is not None:
        data = data.ljust(bytes_of_all, b"\0")[:bytes_of_all]
    return (struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(data)) + data)[: 16 + len(data) - cut]


@pytest.mark.parametrize(
    "code",
    [
        b"not a binary",
        b"\x7fELF",
        b"\x7fELF" + bytes(60),
        b"// PTX text\0",
        elf(2**64 - 64, 64, 1),
        elf(64, 64, 65535, following=100),
        elf(64, 40, 1, following=100),
        fat_binary(),
        fat_binary((64, 100), cut=1),
        fat_binary((64, 100)) + b"\0",
        fat_binary((64, 2**63), bytes_of_all=164),
        fat_binary((2**32 - 1, 0), bytes_of_all=100),
        fat_binary((8, 92)),
        fat_binary((64, 0), (0, 0)),
        fat_binary((16, 0), bytes_of_all=23),
    ],
)
def test_what_is_no_whole_binary_is_refused(make_session, code):
    image = dataclasses.replace(make_image(CASE), code=code)
    check_refused(make_session, pack([image]), "is no whole GPU binary")


def test_a_section_beyond_the_end_is_refused(make_session):
    image = make_image(CASE)
    sections = struct.unpack_from("<Q", image.code, 40)[0]
    code = overwritten(image.code, sections + 64 + 24, "QQ", 2**63, 2**63)
    data = pack([dataclasses.replace(image, code=code)])
    assert struct.unpack_from("<I", data, field_offset("checksum"))[0] == zlib.crc32(code)
    check_refused(make_session, data, "is no whole GPU binary")


def test_two_images_for_one_architecture_are_refused(make_session):
    data = pack([make_image(CASE, 90), make_image(CASE, 80)])
    second = CONTAINER_HEADER_BYTES + struct.unpack_from("<I", data, 12)[0]
    check_refused(make_session, overwritten(data, second, "I", 90), "two images for sm_90")


def test_overlapping_images_are_refused(make_session):
    data = pack([make_image(CASE, 90), make_image(CASE, 80)])
    at = field_offset("offset")
    first = struct.unpack_from("<Q", data, at)[0]
    second = at + struct.unpack_from("<I", data, 12)[0]
    check_refused(make_session, overwritten(data, second, "Q", first), "beyond its place")


@pytest.mark.parametrize(
    "value", [np.zeros(4, np.int8), np.zeros(4, np.int32), np.zeros((2, 2), np.float32), 3, "SCIM", [1, 2], None]
)
def test_a_bad_attribute_is_refused(make_session, value):
    attributes = {**CASE.attributes(), "cuda_images": value}
    if value is None:
        del attributes["cuda_images"]
    with pytest.raises(Exception, match=r"node 'conv1': attribute 'cuda_images' (must be|is missing or is not)"):
        make_session(make_model(CASE, attributes))


def test_a_damaged_container_is_not_looked_at_where_no_image_may_run(make_session):
    damaged = model_with(CASE, b"damaged" * 30)
    check_refused(make_session, b"damaged" * 30)
    assert kernel_of(make_session(damaged, cuda_kernel="csr")) == "cuda.csr"


@pytest.mark.parametrize(("field", "value"), [(60, 0), (56, 0xFFFF)])
def test_code_with_more_parts_than_its_header_counts_is_refused(make_session, field, value):
    image = make_image(CASE)
    data = pack([dataclasses.replace(image, code=overwritten(image.code, field, "H", value))])
    check_refused(make_session, data, "is no whole GPU binary")


def test_no_byte_at_all_is_no_image(make_session, capfd):
    assert kernel_of(make_session(model_with(CASE, b""), severity=2)) == "cuda.csr"
    assert "conv1" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("device", "architectures", "chosen"),
    [
        (75, (75, 80, 86, 90), 75),
        (80, (75, 80, 86, 90), 80),
        (87, (75, 80, 86, 90), 86),
        (89, (86, 80, 75), 86),
        (86, (80, 89, 86), 86),
        (90, (75, 80, 86, 90), 90),
        (103, (120, 100), 100),
    ],
)
def test_the_best_image_is_chosen(driver, make_session, device, architectures, chosen):
    driver.set_device(architecture=device)
    session = make_session(model_with(CASE, pack([make_image(CASE, a) for a in architectures])))
    assert kernel_of(session) == f"cuda.generated(sm_{chosen})"


# What runs instead, from sm_80 on.
OTHERS = "a kernel on tensor cores, or with little work the CSR kernel"


@pytest.mark.parametrize(("device", "architectures"), [(80, (75, 86)), (100, (75, 80, 90))])
def test_where_no_image_is_for_the_gpu_a_warning_says_so(driver, make_session, capfd, device, architectures):
    driver.set_device(architecture=device)
    session = make_session(model_with(CASE, pack([make_image(CASE, a) for a in architectures])), severity=2)
    assert kernel_of(session) == "cuda.csr"
    (warning,) = [line for line in capfd.readouterr().err.splitlines() if "'conv1' runs" in line]
    assert f"runs {OTHERS}: none of its images fits this GPU (sm_{device}) and driver (CUDA 12.8)" in warning
    assert f"that for sm_{architectures[0]} is for another GPU" in warning


def test_an_image_for_a_newer_driver_is_left_out(driver, make_session, capfd):
    driver.set_device(architecture=86)
    newest, older = make_image(CASE, 86, min_driver=13000), make_image(CASE, 80, min_driver=12080)
    assert kernel_of(make_session(model_with(CASE, pack([newest, older])))) == "cuda.generated(sm_80)"
    assert kernel_of(make_session(model_with(CASE, pack([newest])), severity=2)) == "cuda.csr"
    assert "that for sm_86 needs a newer driver" in capfd.readouterr().err
    with pytest.raises(Exception, match=r"node 'conv1': .*asks for the generated kernel, and none of its images fits"):
        make_session(model_with(CASE, pack([newest])), cuda_kernel="generated")


@pytest.mark.parametrize("code", [200, 209])
def test_an_image_that_the_driver_does_not_take_is_left_out(driver, make_session, capfd, code):
    model = model_with(CASE, container())
    driver.fail("cuLibraryLoadData", 2, code)  # behind that of the library's own kernel
    assert kernel_of(make_session(model, severity=2)) == "cuda.csr"
    (warning,) = [line for line in capfd.readouterr().err.splitlines() if "conv1" in line]
    assert f"runs {OTHERS}: its image for sm_90 does not fit, the CUDA driver's cuLibraryLoadData" in warning
    driver.fail("cuLibraryLoadData", 1, code)
    with pytest.raises(Exception, match="node 'conv1': the CUDA driver's cuLibraryLoadData failed"):
        make_session(model, cuda_kernel="generated")


@pytest.mark.parametrize("architecture", [75, 90, 120])
def test_what_nvrtc_makes_is_a_whole_binary(driver, make_session, architecture):
    """Such an image reaches the driver, which is where it is found to be for another machine than this."""
    compilers = [compiler for compiler in nvrtc.installed() if architecture in compiler.supported_architectures()]
    if not compilers or "ASAN_OPTIONS" in os.environ:  # the sanitizer keeps NVRTC from finding its own files
        pytest.skip(f"needs an NVRTC (the extra 'compile') that knows sm_{architecture}")
    options = (f"--gpu-architecture=sm_{architecture}",)
    source = 'extern "C" __global__ void sparseconv_generated(float* y) { __shared__ float s[9]; *y = s[*(int*)y]; }'
    driver.set_device(architecture)
    for compiler in compilers:
        cubin = compiler.compile(nvrtc.Program(source, options=options)).cubin
        packer = fatbin.find(compiler.version[0])
        for code in [cubin] if packer is None else [cubin, packer.compress(cubin, architecture)]:
            image = dataclasses.replace(make_image(CASE, architecture), code=code)
            with pytest.raises(Exception, match=r"the CUDA driver's cuLibraryLoadData failed with \w+INVALID_IMAGE"):
                make_session(model_with(CASE, pack([image])), cuda_kernel="generated")


def test_the_csr_kernel_can_be_forced(make_session, capfd):
    session = make_session(model_with(CASE, container()), severity=2, cuda_kernel="csr")
    assert kernel_of(session) == "cuda.csr"
    assert "conv1" not in capfd.readouterr().err


def test_a_float16_node_that_runs_in_float(make_session, capfd):
    """ONNX Runtime puts Casts around a float16 node among nodes without a float16 kernel; its image does not fit."""
    case = dataclasses.replace(CASE, dtype=np.dtype(np.float16))
    model = model_with(case, container(case))
    (node,) = model.graph.node
    node.input[0], node.output[0] = "positive", "convolved"
    model.graph.node.insert(0, helper.make_node("Abs", ["X"], ["positive"]))
    model.graph.node.append(helper.make_node("Neg", ["convolved"], ["Y"]))
    inputs = random_inputs(case, SHAPE)
    session = make_session(model, severity=2)
    (actual,) = session.run(None, inputs)
    exact, bound = oracle(case, {**inputs, "X": np.abs(inputs["X"])})
    assert_within(-actual, exact, bound)
    assert "that for sm_90 is for the other element type" in capfd.readouterr().err


def test_an_image_of_a_flat_kernel_for_a_deep_one_is_refused(make_session):
    case = SparseConvCase(
        random_weight((8, 6, 2, 3, 3), 0.4), ConvGeometry((2, 3, 3), (1,) * 3, (0, 1, 1) * 2, (1,) * 3)
    )
    flat = SparseConvCase(case.weight[:, :, 0], geometry_2d())
    check_refused(make_session, container(flat), "the number of taps along the depth is 1", case)


def test_dilations_mean_nothing_where_there_is_one_tap(make_session):
    geometry = ConvGeometry((1, 3), (1, 1), (0, 1, 0, 1), (7, 1))
    case = SparseConvCase(random_weight((4, 6, 1, 3), 0.5), geometry)
    session = make_session(model_with(case, container(case, dilations=(1, 1))), cuda_kernel="generated")
    run_and_check(session, case)
