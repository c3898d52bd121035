"""The emulation itself: correct kernels run, and what a GPU forbids is found. Each kernel here is wrong in one way."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re

import numpy as np
import pytest

from tests.support.cuda_emulation import build_driver
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
# Blocks of a cluster, of which those of the first x[0] blocks have nothing to do.
CLUSTER = """
    if (blockIdx.x < x[0]) return;
    const Shared mine = SharedAddress(shared + t);
    const unsigned other = (ClusterRank() + 1) % ClusterSize();
    const float* from = x + blockIdx.x * 64;
    float& to = y[blockIdx.x * 64 + t];
"""
CLUSTER_BARRIER = "ArriveAtCluster();\nWaitForCluster();"
LAST_CLUSTER_BARRIER = f"{CLUSTER_BARRIER}  // last"
EXCHANGE = f"""
    {CLUSTER}
    shared[t] = from[t];
    {CLUSTER_BARRIER}
    const unsigned word = LoadClusterPairIf<1>(true, ClusterAddress(mine, other)).x;
    const uint2 pair = LoadClusterPairIf<2>(true, ClusterAddress(mine - t % 2 * 4, other));
    const uint2 none = LoadClusterPairIf<2>(false, ClusterAddress(mine, 99));
    const bool is_same = word == (t % 2 ? pair.y : pair.x) && none.x == 0 && none.y == 0;
    to = is_same ? BitsToFloat(word) : -1;
    {LAST_CLUSTER_BARRIER}
"""
# Rounds, each of which overwrites what others have read of the one before.
CLUSTER_ROUNDS = f"""
    {CLUSTER}
    __shared__ float fixed[64];
    to = 0;
    for (int i = 1; i < 5; ++i) {{
      shared[t] = fixed[63 - t] = from[t] * i;
      {CLUSTER_BARRIER}
      to += BitsToFloat(LoadClusterPairIf<1>(true, ClusterAddress(mine, other)).x);
      for (unsigned rank = 0; rank < ClusterSize(); ++rank) {{
        to += BitsToFloat(LoadClusterPairIf<1>(true, ClusterAddress(SharedAddress(fixed + 63 - t), rank)).x);
      }}
      {LAST_CLUSTER_BARRIER}
    }}
"""
# What a block has of its own is kept while others run: copies and barriers of its threads.
CLUSTER_OF_BUSY_BLOCKS = f"""
    {CLUSTER}
    const Shared barrier = SharedAddress(shared + 64);
    if (t == 0) {{
      InitBarrier(barrier, 1 + ClusterRank());
      FenceBarrierInit();
    }}
    {CLUSTER_BARRIER}
    if (t == 0) {{
      ExpectBytes(barrier, 256);
      CopyBulk(SharedAddress(shared), from, 256, barrier);
      Arrive(barrier);
    }}
    if (t < 32) {{
      ArriveAtBarrier(1 + ClusterRank(), 64);
      ArriveAtCluster();
      WaitForCluster();
    }} else {{
      ArriveAtCluster();
      WaitAtBarrier(1 + ClusterRank(), 64);
      WaitForCluster();
    }}
    if (t < ClusterRank()) Arrive(barrier);
    WaitForBarrier(barrier, 0);
    {CLUSTER_BARRIER}
    to = BitsToFloat(LoadClusterPairIf<1>(true, ClusterAddress(mine, other)).x);
    {LAST_CLUSTER_BARRIER}
"""
# Some threads wait at the cluster barrier for those that wait for them, but all have arrived.
LATE_CLUSTER_WAIT = f"""
    {CLUSTER}
    shared[t] = from[t];
    ArriveAtCluster();
    if (t < 32) WaitForCluster();
    __syncthreads();
    if (t >= 32) WaitForCluster();
    to = BitsToFloat(LoadClusterPairIf<1>(true, ClusterAddress(mine, other)).x);
    {LAST_CLUSTER_BARRIER}
"""
CLUSTERS = [EXCHANGE, CLUSTER_ROUNDS, CLUSTER_OF_BUSY_BLOCKS, LATE_CLUSTER_WAIT]


def without_last_barrier(body):
    return body.replace(LAST_CLUSTER_BARRIER, "")


def with_barrier(barrier, body=EXCHANGE):
    """With something else in place of the first barrier of a cluster."""
    return body.replace(f"{CLUSTER_BARRIER}\n", f"{barrier}\n", 1)


WRITTEN = "writes to shared address .* without a cluster barrier between"
WRONG_CLUSTERS = {
    "no barrier before a load": (with_barrier("__syncthreads();"), "before the first cluster barrier"),
    "no barrier before a load of later values": (
        with_barrier(f"{CLUSTER_BARRIER}\nshared[t] = 1 + from[t];"),
        WRITTEN,
    ),
    "values written between arriving and waiting": (
        with_barrier("ArriveAtCluster(); shared[t] = 1 + from[t]; WaitForCluster();"),
        WRITTEN,
    ),
    "no barrier before values are overwritten": (
        CLUSTER_ROUNDS.replace(LAST_CLUSTER_BARRIER, f"if (i == 4) {{ {CLUSTER_BARRIER} }}"),
        WRITTEN,
    ),
    "values overwritten between arriving and waiting": (
        EXCHANGE.replace(LAST_CLUSTER_BARRIER, "ArriveAtCluster(); shared[t] = -1; WaitForCluster();"),
        WRITTEN,
    ),
    "one block overwrites values": (
        EXCHANGE.replace(LAST_CLUSTER_BARRIER, f"if (ClusterRank() == 1) {{ shared[5] = -1; }}\n{CLUSTER_BARRIER}"),
        WRITTEN,
    ),
    "a block ends while others may load from it": (
        without_last_barrier(EXCHANGE),
        "which has ended|ends while rank [01] may still load",
    ),
    "only one block loads, and the other one ends": (
        without_last_barrier(EXCHANGE).replace(
            CLUSTER_BARRIER, f"{CLUSTER_BARRIER}\nif (ClusterRank() == 1) {{ return; }}"
        ),
        "which has ended|ends while rank 0 may still load",
    ),
    "a load before waiting": (
        EXCHANGE.replace(
            LAST_CLUSTER_BARRIER,
            "ArriveAtCluster(); LoadClusterPairIf<1>(true, ClusterAddress(mine, other)).x; WaitForCluster();",
        ),
        "after arriving, before it waits",
    ),
    "a rank that the cluster does not have": (
        EXCHANGE.replace("unsigned other = ", "unsigned other = 2 + "),
        "there is no rank [23] in a cluster of 2 blocks",
    ),
    "a misaligned load": (EXCHANGE.replace("mine - t % 2 * 4", "mine"), "not a multiple of 8"),
    "a load behind shared memory": (
        EXCHANGE.replace("mine - t % 2 * 4", "mine + 256 - t * 4"),
        "byte 2.. of 256 bytes of dynamic shared memory",
    ),
    "a load from outside of shared memory": (
        EXCHANGE.replace("mine - t % 2 * 4", "0"),
        "outside of shared memory",
    ),
    "a wait without arriving": (with_barrier("WaitForCluster();"), "without having arrived"),
    "arriving twice": (with_barrier("ArriveAtCluster();\nArriveAtCluster();"), "twice without waiting"),
    "an end without waiting": (
        EXCHANGE.replace(LAST_CLUSTER_BARRIER, "ArriveAtCluster();"),
        "a thread ends that has arrived",
    ),
    "threads that do not come": (
        with_barrier(f"if (t >= 32) {{ return; }}\n{CLUSTER_BARRIER}"),
        "32 of 64 threads wait at the cluster barrier; 32 have ended",
    ),
    "threads that wait elsewhere": (
        with_barrier(f"if (t >= 32) {{ __syncthreads(); }}\n{CLUSTER_BARRIER}"),
        "32 of 64 threads wait at the cluster barrier; 0 have ended, the others wait elsewhere",
    ),
    "a barrier in half a warp": (
        with_barrier(f"if (t % 2) {{ __syncthreads(); }}\n{CLUSTER_BARRIER}"),
        "threads wait at the barrier",
    ),
    "a block that does not come": (
        with_barrier(f"if (ClusterRank() == 1) {{ return; }}\n{CLUSTER_BARRIER}"),
        "waits at the cluster barrier, but 1 of 2 blocks of the cluster have ended",
    ),
}
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
    *CLUSTERS,
    *(body for body, _ in WRONG_CLUSTERS.values()),
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


def run(body, *, x=None, size=THREADS, shared_bytes=None, grid=(1,), cluster=1):
    """Run a body with ``x`` and ``y``, floats in global memory, and ``shared``, dynamic shared memory; returns y."""
    if shared_bytes is None:
        shared_bytes = {PIPELINED: 2 * 4 * THREADS}.get(body, 4 * THREADS + 8 * len(re.findall("InitBarrier", body)))
    x = device_array(np.arange(size, dtype=np.float32) if x is None else x)
    y = device_array(np.full(size, np.nan, np.float32), writable=True)
    arguments = [ctypes.c_void_p(address(a)) for a in (x, y)]
    kernel = f"kernel_{BODIES.index(body)}"
    launch(image(), kernel, grid, (THREADS,), arguments, shared_bytes=shared_bytes, cluster=cluster)
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


def run_clusters(body, *, cluster=2, clusters=2, idle=0, planes=1):
    """Run a body whose blocks exchange values, those of ``idle`` clusters without doing so; returns x and y."""
    blocks = cluster * clusters
    x = np.arange(blocks * THREADS, dtype=np.float32)
    x[0] = cluster * idle
    y = run(body, x=x, size=x.size, grid=(blocks, planes), cluster=cluster)
    return (values.reshape(clusters, cluster, THREADS)[idle:] for values in (x, y))


@pytest.mark.parametrize("cluster", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "body", [EXCHANGE, CLUSTER_OF_BUSY_BLOCKS, LATE_CLUSTER_WAIT], ids=["exchange", "busy blocks", "late wait"]
)
def test_blocks_of_a_cluster_exchange_values(body, cluster):
    x, y = run_clusters(body, cluster=cluster, clusters=3, planes=2)
    np.testing.assert_array_equal(y, np.roll(x, -1, axis=1))


@pytest.mark.parametrize("cluster", [2, 3])
def test_blocks_of_a_cluster_exchange_values_again_and_again(cluster):
    x, y = run_clusters(CLUSTER_ROUNDS, cluster=cluster)
    np.testing.assert_array_equal(y, 10 * (np.roll(x, -1, axis=1) + x.sum(axis=1, keepdims=True)))


def test_blocks_of_a_cluster_need_not_meet():
    np.testing.assert_array_equal(run(FRESH, size=4 * THREADS, grid=(4,), cluster=2), 0)


# The blocks of the second cluster begin in the other order.
@pytest.mark.parametrize("idle", [0, 1])
@pytest.mark.parametrize("name", WRONG_CLUSTERS)
def test_wrong_clusters_are_found(name, idle):
    body, message = WRONG_CLUSTERS[name]
    with pytest.raises(KernelError, match=message):
        run_clusters(body, idle=idle)


def test_a_cluster_after_a_failed_one_works():
    with pytest.raises(KernelError, match=r"kernel_\d+, block \(0, 0, 0\): waits at the cluster barrier"):
        run_clusters(WRONG_CLUSTERS["a block that does not come"][0])
    x, y = run_clusters(EXCHANGE)
    np.testing.assert_array_equal(y, np.roll(x, -1, axis=1))


class LaunchAttribute(ctypes.Structure):
    """As in the driver's interface, as is `LaunchConfig`."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint)),
    )


CLUSTER_OF_2, EARLY_BEGIN = (4, 2, 1, 1), (6, 1)


@pytest.mark.parametrize(
    ("attributes", "wanted"),
    [
        ([], 719),  # CUDA_ERROR_LAUNCH_FAILED: the kernel knows of one block only
        ([EARLY_BEGIN], 719),
        ([CLUSTER_OF_2], 0),
        ([CLUSTER_OF_2, EARLY_BEGIN], 0),
        ([EARLY_BEGIN, CLUSTER_OF_2], 0),
        ([CLUSTER_OF_2, CLUSTER_OF_2], 1),  # CUDA_ERROR_INVALID_VALUE
        ([CLUSTER_OF_2, (5, 1)], 1),
        ([(4, 3, 1, 1)], 1),
        ([(4, 1, 2, 1)], 1),
        ([(4, 16, 1, 1)], 1),
    ],
    ids=str,
)
def test_the_driver_launches_clusters(attributes, wanted):
    source = """
        using namespace sparseconv::cuda;
        extern "C" __global__ void kernel(unsigned* y) {
          __shared__ unsigned shared[1];
          shared[0] = blockIdx.x;
          ArriveAtCluster();
          WaitForCluster();
          y[blockIdx.x] = LoadClusterPairIf<1>(true, ClusterAddress(SharedAddress(shared), 1 - ClusterRank())).x;
          ArriveAtCluster();
          WaitForCluster();
        }
    """
    image = build_host_image('#include "intrinsics.cuh"\n' + source)
    driver = ctypes.CDLL(str(build_driver()))
    driver.fake_cuda_set_device(90, 4, 227 << 10, 1)
    context, library, kernel, function = (ctypes.c_void_p() for _ in range(4))
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    code = image.read_bytes()
    assert driver.cuLibraryLoadData(ctypes.byref(library), code, *[None] * 2, 0, *[None] * 2, 0) == 0
    assert driver.cuLibraryGetKernel(ctypes.byref(kernel), library, b"kernel") == 0
    assert driver.cuKernelGetFunction(ctypes.byref(function), kernel) == 0
    y = np.zeros(16, np.uint32)
    pointer = ctypes.c_void_p(address(y))
    params = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    array = (LaunchAttribute * 2)(*(LaunchAttribute(id, 0, tuple(value)) for id, *value in attributes))
    three = ctypes.c_uint * 3
    stream, first = ctypes.addressof(context), ctypes.addressof(array) if attributes else None
    config = LaunchConfig(three(16, 1, 1), three(1, 1, 1), 0, stream, first, len(attributes))
    result = driver.cuLaunchKernelEx(ctypes.byref(config), function, params, None)
    assert driver.cuLibraryUnload(library) == 0
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
    assert result == wanted
    np.testing.assert_array_equal(y, np.arange(16) ^ 1 if result == 0 else 0)


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


@pytest.mark.parametrize(("blocks", "cluster"), [(3, 2), (4, 0), (16, 16)])
def test_clusters_that_a_gpu_refuses(blocks, cluster):
    with pytest.raises(KernelError, match=f"clusters of {cluster}"):
        run(STORE, grid=(blocks,), cluster=cluster)


def test_an_unknown_kernel_is_an_error():
    image = build_host_image('extern "C" __global__ void kernel() {}')
    with pytest.raises(KernelError, match="no kernel other"):
        launch(image, "other", (1,), (1,), [])
