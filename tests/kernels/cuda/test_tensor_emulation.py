"""The emulation of what the tensor-core kernel needs: matrices in shared memory, sparse products, numbered barriers."""

from __future__ import annotations

import ctypes
import functools
import re

import numpy as np
import pytest

from tests.support.cuda_emulation import build_driver, fake_driver
from tests.support.cuda_host_build import (
    KernelError,
    address,
    build_host_image,
    check_surroundings,
    device_array,
    launch,
)

LANES = np.arange(32)
THREADS = 96

# --- matrices in shared memory, and vectors -------------------------------------------------------------------------

# Rows of 16 bytes, each lane's in a place of its own.
MATRICES = """
    const unsigned row = 32 * (t / 32) + t % 32 * 5 % 32;
    const Shared to = SharedAddress(shared) + 16 * row;
    StoreSharedVectorIf(1, to, {x[4 * t], x[4 * t + 1], x[4 * t + 2], x[4 * t + 3]});
    __syncwarp();
    unsigned parts[4];
    LoadMatrices(to, parts);
    StoreSharedVectorIf(1, to, {0, 0, 0, 0});  // all have read
    for (int i = 0; i < 4; ++i) y[4 * t + i] = parts[i];
"""
VECTORS = """
    const Shared to = SharedAddress(shared) + 16 * t;
    StoreSharedVectorIf(0, to + 1, {9, 9, 9, 9});
    StoreSharedVectorIf(4, to, {x[4 * t], x[4 * t + 1], x[4 * t + 2], 7});
    unsigned a, b;
    LoadSharedPair(to + 8, a, b);
    const uint4 all = LoadSharedVector(to);
    y[4 * t] = all.x + all.w;
    y[4 * t + 1] = all.y + b;
    y[4 * t + 2] = all.z - a;
    y[4 * t + 3] = LoadReadOnly(x + 4 * t + 3);
"""
COPIES = """
    const Shared to = SharedAddress(shared) + 16 * t;
    CopyAsync16Cached(to, x + 4 * t);
    CommitCopies();
    WaitForCopies<0>();
    const uint4 all = LoadSharedVector(to);
    y[4 * t] = all.w;
    y[4 * t + 1] = all.z;
    y[4 * t + 2] = all.y;
    y[4 * t + 3] = all.x;
"""
BYTES = """
    const unsigned selectors[] = {kLowerHalves, kUpperHalves, 0x0246, 0xF3A1};
    for (int i = 0; i < 4; ++i) y[4 * t + i] = SelectBytes(x[4 * t], x[4 * t + 1], selectors[i]);
"""

# --- products -------------------------------------------------------------------------------------------------------

# Of each lane: a, b, metadata, and what the sums begin with.
PRODUCT = """
    const unsigned* mine = x + 13 * t;
    float sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = BitsToFloat(mine[9 + i]);
    const uint4 a = {mine[0], mine[1], mine[2], mine[3]};
    MultiplySparse<SELECTOR>(sums, a, {mine[4], mine[5], mine[6], mine[7]}, mine[8]);
    __builtin_memcpy(y + 4 * t, sums, sizeof(sums));
"""
PRODUCTS = [PRODUCT.replace("SELECTOR", str(selector)) for selector in (0, 1)]

# --- numbered barriers ----------------------------------------------------------------------------------------------

# The last warp brings what the others add up, in two stages: barriers 1 and 2, that a stage is filled, 3 and 4, that it
# is free.
STAGES = """
    if (t >= 64) {
      for (unsigned stage = 0; stage < 5; ++stage) {
        if (stage >= 2) WaitAtBarrier(3 + stage % 2, 96);  // free
        const Shared to = SharedAddress(shared + stage % 2 * 64 + t - 64);
        StoreShared(to, x[64 * stage + t - 64]);
        CopyAsync4(to + 128, x + 64 * stage + t - 32);
        CommitCopies();
        WaitForCopies<0>();  // arrived
        ArriveAtBarrier(1 + stage % 2, 96);
      }
      return;
    }
    unsigned sum = 0;
    for (unsigned stage = 0; stage < 5; ++stage) {
      WaitAtBarrier(1 + stage % 2, 96);  // filled
      sum += shared[stage % 2 * 64 + 63 - t];
      if (stage + 2 < 5) ArriveAtBarrier(3 + stage % 2, 96);
    }
    shared[128 + t] = sum;
    WaitAtBarrier(5, 64);  // both
    y[t] = shared[128 + 63 - t];
"""
RACING = {
    "nobody waits for what fills a stage": STAGES.replace("WaitAtBarrier(1", "ArriveAtBarrier(1"),
    "nobody waits for the copies": re.sub(r"[^\n]*// arrived", "", STAGES),
    "nobody waits for the other warp": re.sub(r"[^\n]*// both", "", STAGES),
}
WRONG = {
    "a stage is filled again too early": (re.sub(r"[^\n]*// free", "", STAGES), "to barrier [1-4] twice in one phase"),
    "a wait too many": (
        STAGES.replace("stage >= 2", "stage >= 1"),
        "deadlock: 96 threads wait .*, 64 of 96 at barrier 2, 64 of 96 at barrier 3, 32 of 96 at barrier 4",
    ),
    "an arrival too many": (
        STAGES.replace("stage + 2 < 5", "stage + 1 < 5"),
        "for nothing when the block ends, 64 of 96 at barrier 4",
    ),
    "a wait that never ends": ("if (t < 32) WaitAtBarrier(1, 64);", "deadlock: 32 threads .*, 32 of 64 at barrier 1"),
    "two waits for each other": (
        "if (t < 32) WaitAtBarrier(1, 64); else if (t < 64) WaitAtBarrier(2, 64);",
        "deadlock: 64 threads wait .*, 32 of 64 at barrier 1, 32 of 64 at barrier 2",
    ),
    "other warps wait at __syncthreads": (
        "if (t < 32) WaitAtBarrier(1, 64); else __syncthreads();",
        "64 of 96 threads wait at the barrier .* the others wait elsewhere",
    ),
    "an arrival that nobody waits for": (
        "if (t < 32) ArriveAtBarrier(15, 64);",
        "for nothing when the block ends, 32 of 64 at barrier 15",
    ),
    "two arrivals": (
        "if (t < 32) { ArriveAtBarrier(1, 64); ArriveAtBarrier(1, 64); }",
        "the warp comes to barrier 1 twice in one phase",
    ),
    "warps that disagree": ("WaitAtBarrier(1, t < 64 ? 96 : 64);", "barrier 1 of 64 threads, of 96 where others"),
    "threads of a warp that disagree": ("WaitAtBarrier(1, t % 32 ? 96 : 64);", "barrier.sync of different kinds"),
    "a wait and an arrival in one warp": (
        "if (t % 2) WaitAtBarrier(1, 96); else ArriveAtBarrier(1, 96);",
        "but others of the warp are at barrier",
    ),
    "half a warp": ("if (t % 2) WaitAtBarrier(1, 96);", "deadlock: 48 threads wait for copies, for their warp"),
    "a count that nobody reaches": ("if (t == 0) WaitForCount(x, 0xFFFFFFFFu);", "deadlock: 1 threads wait"),
    "barrier 0": ("WaitAtBarrier(0, 96);", "barrier 0 is that of __syncthreads"),
    "barrier 16": ("ArriveAtBarrier(16, 96);", "there is no barrier 16"),
    "barrier -1": ("WaitAtBarrier(-1, 96);", "there is no barrier -1"),
    "no whole warps": ("WaitAtBarrier(1, 48);", "barrier 1 of 48 threads, in a block of 96"),
    "nobody": ("WaitAtBarrier(1, 0);", "barrier 1 of 0 threads"),
    "more than the block": ("WaitAtBarrier(1, 128);", "barrier 1 of 128 threads, in a block of 96"),
    "a misaligned row": (
        MATRICES.replace("(to, parts)", "(to + 8, parts)"),
        "shared address .* is not a multiple of 16",
    ),
    "a row behind shared memory": (
        MATRICES.replace("(to, parts)", "(to + 16, parts)"),
        "thread 83: .* of 1536 bytes of dynamic shared memory",
    ),
    "matrices for half a warp": ("if (t % 2) {" + MATRICES + "}", "deadlock"),
    "matrices and an exchange": (
        MATRICES.replace("LoadMatrices", "if (t % 2) __syncwarp(); else LoadMatrices"),
        "but others of the warp are at",
    ),
    "products of both kinds": (
        "if (t % 2) {" + PRODUCTS[0] + "} else {" + PRODUCTS[1] + "}",
        "threads of a warp are at mma.sp of different kinds",
    ),
    "a misaligned vector store": (VECTORS.replace("(4, to,", "(4, to + 8,"), "is not a multiple of 16"),
    "a misaligned vector load": (VECTORS.replace("Vector(to)", "Vector(to + 4)"), "is not a multiple of 16"),
    "a misaligned pair": (VECTORS.replace("(to + 8, a", "(to + 4, a"), "is not a multiple of 8"),
    "a misaligned copy": (COPIES.replace("(to, x + 4 * t)", "(to, x + 3 * t)"), "is not a multiple of 16"),
    "two misaligned halves": (
        VECTORS.replace("x + 4 * t + 3)", "reinterpret_cast<const Half2*>(reinterpret_cast<const char*>(x) + 2))"),
        "global address .* is not a multiple of 4",
    ),
    "two misaligned halves of the output": (
        "StoreOnce(reinterpret_cast<Half2*>(reinterpret_cast<char*>(y) + 2), 0u);",
        "global address .* is not a multiple of 4",
    ),
}
BODIES = [
    MATRICES,
    VECTORS,
    COPIES,
    BYTES,
    *PRODUCTS,
    STAGES,
    *RACING.values(),
    *(body for body, _ in WRONG.values()),
    "WaitAtBarrier(1, 32);",
]


@functools.cache
def image():
    """One kernel for every body."""
    kernels = [
        f"""
        extern "C" __global__ void kernel_{i}([[maybe_unused]] const unsigned* x, [[maybe_unused]] unsigned* y) {{
          extern __shared__ uint4 dynamic[];
          [[maybe_unused]] unsigned* shared = reinterpret_cast<unsigned*>(dynamic);
          [[maybe_unused]] const unsigned t = threadIdx.x;
          {body}
        }}
        """
        for i, body in enumerate(BODIES)
    ]
    return build_host_image("\n".join(['#include "intrinsics.cuh"', "using namespace sparseconv::cuda;", *kernels]))


def run(body, x=None, *, threads=THREADS):
    """Run a body with ``x`` and ``y``, four words a thread, and ``shared``; returns y."""
    x = device_array(np.arange(4 * threads, dtype=np.uint32) if x is None else x.astype(np.uint32, copy=False))
    # Floats, for device_array can only surround these with NaNs.
    y = device_array(np.full(4 * threads, np.nan, np.float32), writable=True)
    arguments = [ctypes.c_void_p(address(a)) for a in (x, y)]
    launch(image(), f"kernel_{BODIES.index(body)}", (1,), (threads,), arguments, shared_bytes=16 * THREADS)
    check_surroundings(y)
    return y.view(np.uint32).reshape(threads, 4)


def random_words(seed, count):
    return np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)


def test_matrices_are_loaded_and_transposed():
    x = random_words(0, 4 * THREADS)
    rows = x.view(np.uint16).reshape(THREADS // 32, 4, 8, 8)
    wanted = np.stack([rows[:, :, 2 * (lane % 4) : 2 * (lane % 4) + 2, lane // 4] for lane in LANES], axis=1)
    np.testing.assert_array_equal(run(MATRICES, x).view(np.uint16).reshape(wanted.shape), wanted)


def test_vectors_are_stored_and_loaded():
    x = random_words(1, 4 * THREADS)
    wanted = x.reshape(THREADS, 4) + np.array([7, 7, 0, 0], np.uint32)
    wanted[:, 2] = 0
    np.testing.assert_array_equal(run(VECTORS, x), wanted)


def test_vectors_are_copied():
    np.testing.assert_array_equal(run(COPIES), np.arange(4 * THREADS).reshape(THREADS, 4)[:, ::-1])


def test_bytes_are_selected():
    x = random_words(2, 4 * THREADS)
    given = x.view(np.uint8).reshape(THREADS, 16)[:, :8]
    wanted = given[:, [[0, 1, 4, 5], [2, 3, 6, 7], [6, 4, 2, 0], [1, 2, 3, 7]]]
    np.testing.assert_array_equal(run(BYTES, x).view(np.uint8).reshape(wanted.shape), wanted)


def random_halves(generator, shape):
    """Such that sums of their products are exact, whatever the order."""
    return (generator.integers(-32, 33, shape) / 8).astype(np.float16)


def sparse_product(generator, selector):
    """Operands of a warp, as its lanes hold them, and the result; matrices as the PTX manual lays them out."""
    stored, b = random_halves(generator, (16, 16)), random_halves(generator, (32, 8))
    sums = random_halves(generator, (16, 8)).astype(np.float32)
    places = np.array([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]])[generator.integers(0, 6, (16, 8))]
    dense = np.zeros((16, 8, 4))
    np.put_along_axis(dense, places, stored.reshape(16, 8, 2), axis=2)
    result = sums + dense.reshape(16, 32) @ b.astype(np.float64)

    row, pair = LANES // 4, LANES % 4 * 2  # of each lane
    halves = np.empty((32, 8, 2), np.float16)
    for part in range(4):
        for i in range(2):
            halves[:, part, i] = stored[row + part % 2 * 8, pair + part // 2 * 8 + i]
            halves[:, 4 + part, i] = b[pair + i + 8 * part, row]
    words = np.empty((32, 13), np.uint32)
    words[:, :8] = halves.view(np.uint32)[:, :, 0]
    words[:, 8] = generator.integers(0, 2**32, 32, np.uint32)  # the other lanes' is of no account
    for lane in np.flatnonzero(selector == LANES % 4 // 2):
        nibbles = (places[[row[lane], row[lane] + 8]] @ [1, 4])[:, lane % 2 * 4 : lane % 2 * 4 + 4].reshape(8)
        words[lane, 8] = sum(int(nibble) << (4 * i) for i, nibble in enumerate(nibbles))
    words[:, 9:] = parts_of(sums).view(np.uint32)
    return words, parts_of(result)


def parts_of(sums):
    """Four of [16, 8] for each lane."""
    pair = LANES % 4 * 2
    return np.stack([sums[LANES // 4 + i // 2 * 8, pair + i % 2] for i in range(4)], axis=1)


@pytest.mark.parametrize("selector", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_sparse_matrices_are_multiplied(seed, selector):
    generator = np.random.default_rng(seed)
    operands, wanted = zip(*(sparse_product(generator, selector) for _ in range(THREADS // 32)), strict=True)
    y = run(PRODUCTS[selector], np.concatenate(operands).reshape(-1))
    np.testing.assert_array_equal(y.view(np.float32), np.concatenate(wanted))


def test_a_stored_zero_is_multiplied_too():
    operands = np.tile(sparse_product(np.random.default_rng(0), 0)[0], (THREADS // 32, 1))
    operands[:, :4] = 0
    operands[:, 4:8] = 0x7C007C00  # infinite
    assert np.isnan(run(PRODUCTS[0], operands.reshape(-1)).view(np.float32)).all()


@pytest.mark.parametrize("nibble", [0b0000, 0b0101, 0b0001, 0b0111])
@pytest.mark.parametrize("selector", [0, 1])
def test_places_out_of_order_are_found(selector, nibble):
    operands = np.tile(sparse_product(np.random.default_rng(0), selector)[0], (THREADS // 32, 1))
    lane = 40 + 2 * selector
    operands[lane, 8] = operands[lane, 8] & ~np.uint32(0xF00) | np.uint32(nibble << 8)
    with pytest.raises(KernelError, match=f"thread {lane}: mma.sp: metadata .* digit 2 of which is not in order"):
        run(PRODUCTS[selector], operands.reshape(-1))


def test_warps_hand_stages_to_each_other():
    x = random_words(3, 5 * 64)
    np.testing.assert_array_equal(run(STAGES, x).reshape(-1)[:64], x.reshape(5, 64).sum(axis=0, dtype=np.uint32))


@pytest.mark.parametrize("name", RACING)
def test_races_are_seen(name):
    x = random_words(3, 5 * 64)
    assert (run(RACING[name], x).reshape(-1)[:64] != x.reshape(5, 64).sum(axis=0, dtype=np.uint32)).any()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_found(name):
    body, message = WRONG[name]
    with pytest.raises(KernelError, match=message):
        run(body, random_words(4, 13 * THREADS) & 0xCCCCCCCC | 0x44444444)  # metadata in order


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (MATRICES, "ldmatrix in a warp of 16 threads"),
        (PRODUCTS[0], r"mma\.sp in a warp of 16 threads"),
        ("WaitAtBarrier(1, 32);", r"barrier\.sync in a warp of 16 threads"),
    ],
    ids=["ldmatrix", "mma.sp", "barrier"],
)
def test_warps_must_be_whole(body, message):
    with pytest.raises(KernelError, match=message):
        run(body, np.full(13 * THREADS, 0x44444444), threads=48)


# --- the library's kernels ------------------------------------------------------------------------------------------


@pytest.fixture
def driver():
    driver = fake_driver()
    driver.reset()
    with driver.current_context(0):
        yield ctypes.CDLL(str(build_driver()))
    driver.reset()


def ptx(kernel, target=80):
    return f".version 8.1\n.target sm_{target}\n.address_size 64\n.visible .entry {kernel}(\n".encode()


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ("sparseconv_tensor_r4_p7", {"sparseconv_tensor_r2_p16"}),
        ("sparseconv_csr_f32_b1", {"sparseconv_csr_f16_b8", "sparseconv_reduce_f16"}),
    ],
    ids=["tensor", "library"],
)
def test_the_driver_finds_the_kernels_of_each_text(driver, first, others):
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuLibraryLoadData(ctypes.byref(library), ptx(first), None, None, 0, None, None, 0) == 0
    wanted = {first, *others}
    found = {
        name
        for name in ("sparseconv_tensor_r4_p7", "sparseconv_csr_f32_b1", *wanted)
        if driver.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode()) == 0
    }
    assert driver.cuLibraryUnload(library) == 0
    assert found == wanted


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (ptx("sparseconv_tensor_r4_p7", 100), "NO_BINARY_FOR_GPU"),
        (ptx("unknown"), "INVALID_IMAGE"),
        (b"no PTX", "INVALID_IMAGE"),
    ],
    ids=["newer", "unknown", "none"],
)
def test_the_driver_refuses_other_texts(driver, text, code):
    library, name = ctypes.c_void_p(), ctypes.c_char_p()
    result = driver.cuLibraryLoadData(ctypes.byref(library), text, None, None, 0, None, None, 0)
    driver.cuGetErrorName(result, ctypes.byref(name))
    assert name.value.decode() == f"CUDA_ERROR_{code}"
