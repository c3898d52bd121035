"""The emulation itself: correct kernels run, and what a GPU forbids is found. Each kernel here is wrong in one way."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re

import numpy as np
import pytest

from tests.support.cuda_host_build import (
    KernelError,
    address,
    build_host_image,
    check_surroundings,
    device_array,
    launch,
)

THREADS = 64


REVERSE = "y[t] = shared[63 - t];"
BEGIN_BARRIER = """
    const Shared barrier = SharedAddress(shared + 64);
    if (t == 0) {
      InitBarrier(barrier, 1);
      FenceBarrierInit();
    }
    __syncthreads();
"""
BULK = (
    BEGIN_BARRIER
    + """
    if (t == 0) {
      ExpectBytes(barrier, 256);
      CopyBulk(SharedAddress(shared), x, 256, barrier);
      Arrive(barrier);
    }
    WaitForBarrier(barrier, 0);
"""
    + REVERSE
)
ASYNC = (
    """
    CopyAsync4(SharedAddress(shared + t), x + t);
    CommitCopies();
    WaitForCopies<0>();
    __syncthreads();
"""
    + REVERSE
)
ASYNC_16 = (
    """
    if (t < 16) CopyAsync16(SharedAddress(shared + 4 * t), x + 4 * t);
    CommitCopies();
    WaitForCopies<0>();
    __syncthreads();
"""
    + REVERSE
)
# May begin before the launch in front of it is complete.
EARLY = """
    LetNextLaunchBegin();
    WaitForLaunchBefore();
    StoreOnce(y + t, LoadOnce(x + 63 - t));
"""
ASYNC_BARRIER = (
    BEGIN_BARRIER.replace("(barrier, 1)", "(barrier, 64)")
    + """
    if (t < 16) CopyAsync16ByLines(SharedAddress(shared + 4 * t), x + 4 * t);
    ArriveAfterCopies(barrier);
    WaitForBarrier(barrier, 0);
"""
    + REVERSE
)
PIPELINED = """
    const Shared to = SharedAddress(shared + t);
    CopyAsync4(to, x + t);
    CommitCopies();
    CopyAsync4(to + 256, x + t);
    CommitCopies();
    WaitForCopies<1>();
    __syncthreads();
    y[t] = shared[63 - t];
    WaitForCopies<0>();
    __syncthreads();
    y[t] -= shared[64 + (62 - t) % 64] - 1;
"""
STORE = "shared[t] = x[t]; __syncthreads();" + REVERSE
PHASES = """
    const Shared barrier = SharedAddress(shared + 64);
    if (t == 0) InitBarrier(barrier, 32);
    FenceBarrierInit();
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < 5; ++i) {
      if (t < 32) {
        const unsigned half = (t - 7) * 32;
        if (t == 7 || t == 8) {
          ExpectBytes(barrier, 128);
          CopyBulk(SharedAddress(shared + half), x + i * 64 + half, 128, barrier);
        }
        Arrive(barrier);
      }
      WaitForBarrier(barrier, i % 2);
      sum += shared[t];
      __syncthreads();
    }
    y[t] = sum;
"""
VOTES = """
    const unsigned votes = __ballot_sync(0xFFFFFFFFu, t % 3 == 0);
    y[t] = __builtin_popcount(votes) + 100 * __all_sync(0xFFFFFFFFu, t < 32) + 1000 * __any_sync(0xFFFFFFFFu, t == 40) +
           10000 * (__shfl_xor_sync(0xFFFFFFFFu, t, 1) == (t ^ 1));
"""
REFILL = """
    const Shared barrier = SharedAddress(shared + 64);
    if (t == 0) {
      InitBarrier(barrier, 1);
      FenceBarrierInit();
    }
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      if (t == 0) {
        ExpectBytes(barrier, 256);
        CopyBulk(SharedAddress(shared), x + 64 * i, 256, barrier);
        Arrive(barrier);
      }
      WaitForBarrier(barrier, i % 2);
      sum += shared[63 - t];
      __syncthreads();  // refill
    }
    y[t] = sum;
"""
REFILL_ASYNC = """
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      CopyAsync4(SharedAddress(shared + t), x + 64 * i + t);
      CommitCopies();
      WaitForCopies<0>();
      __syncthreads();
      sum += shared[63 - t];
      __syncthreads();  // refill
    }
    y[t] = sum;
"""
# One warp copies, the other one computes.
REFILL_BY_A_WARP = """
    const Shared filled = SharedAddress(shared + 64), emptied = filled + 8;
    if (t == 0) InitBarrier(filled, 1);
    if (t == 1) InitBarrier(emptied, 1);
    FenceBarrierInit();
    __syncthreads();
    if (t >= 32) {
      for (int i = 0; i < 4; ++i) {
        if (i > 0) WaitForBarrier(emptied, (i - 1) % 2);  // refill
        if (IsElected()) {
          ExpectBytes(filled, 256);
          CopyBulk(SharedAddress(shared), x + 64 * i, 256, filled);
          Arrive(filled);
        }
      }
      return;
    }
    y[t] = y[t + 32] = 0;
    for (int i = 0; i < 4; ++i) {
      WaitForBarrier(filled, i % 2);
      y[t] += shared[63 - t];
      y[t + 32] += shared[31 - t];
      __syncwarp();
      if (t == 0) Arrive(emptied);
    }
"""
REFILLS = [REFILL, REFILL_ASYNC, REFILL_BY_A_WARP]
RACING = [re.sub(r"[^\n]*// refill", "", body) for body in REFILLS]
FRESH = """
    __shared__ float fixed[64];
    y[blockIdx.x * 64 + t] = fixed[t] == fixed[t] || shared[t] == shared[t];
    fixed[t] = shared[t] = 1;
"""
WRONG = {
    "no wait for a group": (ASYNC.replace("WaitForCopies<0>();", ""), None),
    "no commit": (ASYNC.replace("CommitCopies();", ""), None),
    "no barrier after copies": (ASYNC.replace("__syncthreads();", ""), None),
    "no barrier after stores": (STORE.replace("__syncthreads();", ""), None),
    "the wait leaves too many groups": (ASYNC.replace("<0>", "<1>"), None),
    "an arrival that waits for no copies": (ASYNC_BARRIER.replace("ArriveAfterCopies", "Arrive"), None),
    "no wait for copies at a barrier": (
        ASYNC_BARRIER.replace("WaitForBarrier(barrier, 0);", ""),
        "under way when the block ends",
    ),
    "no wait for a bulk copy": (BULK.replace("WaitForBarrier(barrier, 0);", ""), "under way when the block ends"),
    "only one thread waits for a bulk copy": (BULK.replace("WaitForBarrier", "if (t == 0) WaitForBarrier"), None),
    "the wrong phase": (BULK.replace("(barrier, 0)", "(barrier, 1)"), "under way when the block ends"),
    "a phase that never ends": (BULK.replace("(barrier, 256)", "(barrier, 272)"), "deadlock"),
    "no fence": (BULK.replace("FenceBarrierInit();", ""), "no fence"),
    "no barrier after init": (BULK.replace("__syncthreads();", ""), "no __syncthreads between"),
    "init twice": (
        BULK.replace("InitBarrier(barrier, 1);", "InitBarrier(barrier, 1); InitBarrier(barrier, 1);"),
        "twice",
    ),
    "no init": (BULK.replace("InitBarrier(barrier, 1);", ""), "there is no mbarrier"),
    "too many arrivals": (BULK.replace("Arrive(barrier)", "Arrive(barrier); Arrive(barrier)"), "arrivals"),
    "bytes that nobody expects": (BULK.replace("ExpectBytes(barrier, 256);", ""), "under way when the block ends"),
    "too many bytes": (BULK.replace("(barrier, 256)", "(barrier, 1 << 20)"), "waits for too many bytes"),
    "no arrival": (BULK.replace("Arrive(barrier);", ""), "deadlock"),
    "an overwritten mbarrier": (BULK.replace("ExpectBytes", "shared[64] = 0; ExpectBytes"), "was overwritten"),
    "a bulk copy of 8 bytes": (BULK.replace("x, 256", "x, 248"), "a bulk copy of 248 bytes"),
    "a bulk copy from a misaligned address": (BULK.replace("x, 256", "x + 2, 240"), "not a multiple of 16"),
    "a bulk copy to a misaligned address": (BULK.replace("(shared), x", "(shared + 1), x"), "not a multiple of 16"),
    "a vector copy from a misaligned address": (ASYNC_16.replace("x + 4 * t", "x + 3 * t"), "not a multiple of 16"),
    "a vector copy to a misaligned address": (
        ASYNC_16.replace("shared + 4 * t", "shared + 2 * t"),
        "not a multiple of 16",
    ),
    "a copy to a misaligned address": (ASYNC.replace("(shared + t)", "(shared) + 2 * t"), "not a multiple of 4"),
    "shared memory behind its end": (
        ASYNC.replace("(shared + t)", "(shared + t + 1)"),
        "of 256 bytes of dynamic shared memory",
    ),
    "a store behind shared memory": (
        STORE.replace("shared[t]", "shared[t + 1]"),
        "behind the end of dynamic shared memory",
    ),
    "a load behind shared memory": (STORE.replace("63 - t", "64 - t"), None),
    "shared address 0": ("StoreShared(0, 1u);", "outside of shared memory"),
    "an address that is not shared": ("StoreShared(SharedAddress(x), 1u);", "not an address of shared memory"),
    "a barrier that some threads do not reach": (
        "if (t < 32) __syncthreads();",
        "32 of 64 threads wait at the barrier",
    ),
    "two barriers": ("if (t < 32) __syncthreads();\nelse\n__syncthreads();", "threads wait at different barriers"),
    "a vote that some threads do not join": ("if (t != 5) __all_sync(0xFFFFFFFFu, true);", "deadlock"),
    "a barrier in half a warp": ("if (t % 2) __syncthreads(); else __syncwarp();", "threads wait at the barrier"),
    "a load before the launch in front is complete": (
        EARLY.replace("WaitForLaunchBefore();", "if (t != 9) WaitForLaunchBefore();"),
        "thread 9: touches memory before it has waited",
    ),
    "an early copy": ("LetNextLaunchBegin();" + ASYNC, "touches memory before it has waited"),
    "what may change by way of the read-only cache": (
        EARLY.replace("LoadOnce", "LoadReadOnly"),
        "may still be written",
    ),
    "a load behind the input": ("y[t] = x[t + 1];", "reads from"),
    "a store behind the output": ("y[t + 1] = x[t];", "writes to"),
    "a store to the input": ("const_cast<float*>(x)[t] = 1;", "writes to"),
    "a division by zero": ("y[t] = 7 / static_cast<int>(x[t]);", "divides by zero"),
}
BACKWARDS = np.arange(THREADS, dtype=np.float32)[::-1]
BODIES = [
    STORE,
    EARLY,
    ASYNC,
    ASYNC_16,
    ASYNC_BARRIER,
    BULK,
    PIPELINED,
    PHASES,
    VOTES,
    FRESH,
    *REFILLS,
    *RACING,
    *(body for body, _ in WRONG.values()),
]


@functools.cache
def image():
    """One kernel for every body."""
    kernels = [
        f"""
        extern "C" __global__ void kernel_{i}([[maybe_unused]] const float* x, [[maybe_unused]] float* y) {{
          extern __shared__ __align__(16) float shared[];
          (void)shared;
          [[maybe_unused]] const unsigned t = threadIdx.x;
          {body}
        }}
        """
        for i, body in enumerate(BODIES)
    ]
    return build_host_image("\n".join(['#include "intrinsics.cuh"', "using namespace sparseconv::cuda;", *kernels]))


def run(body, *, x=None, size=THREADS, shared_bytes=None, grid=(1,)):
    """Run a body with ``x`` and ``y``, floats in global memory, and ``shared``, dynamic shared memory; returns y."""
    if shared_bytes is None:
        shared_bytes = {PIPELINED: 2 * 4 * THREADS}.get(body, 4 * THREADS + 8 * len(re.findall("InitBarrier", body)))
    x = device_array(np.arange(size, dtype=np.float32) if x is None else x)
    y = device_array(np.full(size, np.nan, np.float32), writable=True)
    arguments = [ctypes.c_void_p(address(a)) for a in (x, y)]
    launch(image(), f"kernel_{BODIES.index(body)}", grid, (THREADS,), arguments, shared_bytes=shared_bytes)
    check_surroundings(y)
    return y


@pytest.mark.parametrize(
    "body",
    [STORE, EARLY, ASYNC, ASYNC_16, ASYNC_BARRIER, BULK],
    ids=["store", "early", "async", "async16", "async barrier", "bulk"],
)
def test_correct_kernels_run(body):
    np.testing.assert_array_equal(run(body), BACKWARDS)


def test_copies_arrive_group_by_group():
    np.testing.assert_array_equal(run(PIPELINED)[:63], 2)


def test_a_barrier_serves_phase_after_phase():
    x = np.arange(5 * THREADS, dtype=np.float32)
    np.testing.assert_array_equal(run(PHASES, x=x), x.reshape(5, THREADS).sum(axis=0))


@pytest.mark.parametrize("kind", [0, 1], ids=["bulk", "async"])
def test_copies_over_data_that_others_still_read_are_seen(kind):
    x = np.arange(4 * THREADS, dtype=np.float32)
    wanted = x.reshape(4, THREADS)[:, ::-1].sum(axis=0)
    np.testing.assert_array_equal(run(REFILLS[kind], x=x), wanted)
    assert (run(RACING[kind], x=x) != wanted).any()


def test_a_warp_that_copies_without_waiting_for_the_others_is_seen():
    x = np.arange(4 * THREADS, dtype=np.float32)
    np.testing.assert_array_equal(run(REFILL_BY_A_WARP, x=x), x.reshape(4, THREADS)[:, ::-1].sum(axis=0))
    with pytest.raises(KernelError, match="more than 1 arrivals"):
        run(RACING[-1], x=x)


def test_warps_vote_and_exchange():
    np.testing.assert_array_equal(run(VOTES), np.repeat([11 + 100 + 10000, 11 + 1000 + 10000], 32))


def test_shared_memory_is_fresh_in_every_block():
    assert not run(FRESH, size=3 * THREADS, grid=(3,)).any()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_blocks_and_threads_have_their_indices(axis):
    source = """
        extern "C" __global__ void kernel(int* out, int axis) {
          const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
          const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
          const unsigned index[3] = {threadIdx.x + 10 * blockIdx.x, threadIdx.y + 10 * blockIdx.y,
                                     threadIdx.z + 10 * blockIdx.z};
          out[block * blockDim.x * blockDim.y * blockDim.z + thread] = index[axis];
        }
    """
    image = build_host_image('#include "intrinsics.cuh"\n' + source)
    grid, block = (2, 3, 4), (4, 3, 2)
    out = np.full((*grid[::-1], *block[::-1]), -1, np.int32)
    launch(image, "kernel", grid, block, [ctypes.c_void_p(address(out)), ctypes.c_int(axis)])
    for index in itertools.product(*map(range, out.shape)):
        assert out[index] == index[5 - axis] + 10 * index[2 - axis]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_found(name):
    body, message = WRONG[name]
    if message is None:
        assert (run(body) != BACKWARDS).any()
        return
    with pytest.raises(KernelError, match=message):
        run(body)


def test_a_launch_after_a_failed_one_works():
    with pytest.raises(KernelError, match=r"kernel_\d+, block \(0, 0, 0\), thread 0: "):
        run(WRONG["shared address 0"][0])
    np.testing.assert_array_equal(run(STORE), BACKWARDS)


@pytest.mark.parametrize("shared_bytes", [228 * 1024, 256])
def test_launches_that_a_gpu_refuses(shared_bytes):
    with pytest.raises(KernelError, match="bytes of shared memory"):
        run(STORE, shared_bytes=shared_bytes, grid=(1, 65536 if shared_bytes == 256 else 1))


def test_an_unknown_kernel_is_an_error():
    image = build_host_image('extern "C" __global__ void kernel() {}')
    with pytest.raises(KernelError, match="no kernel other"):
        launch(image, "other", (1,), (1,), [])
