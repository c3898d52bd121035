"""Results do not depend on threads, neighbouring calls or the place of the input; steady runs do not allocate."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry
from tests.support.native_build import ROOT, find_tool
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    geometry_2d,
    make_model,
    make_session,
    oracle,
    random_inputs,
    random_weight,
)

# Together they take every way through the kernel: in place, packed by each task, packed first; one block of input
# channels and several; one group and many.
LAYERS = {
    "packed by each task": (SparseConvCase(random_weight((32, 24, 3, 3), 0.2), geometry_2d()), (40, 24, 40, 40)),
    "packed first": (SparseConvCase(random_weight((256, 256, 3, 3), 0.2), geometry_2d()), (1, 256, 14, 14)),
    "one small task": (SparseConvCase(random_weight((8, 4, 3, 3), 0.2), geometry_2d()), (1, 4, 9, 9)),
    "in place": (SparseConvCase(random_weight((128, 96, 1, 1), 0.2), geometry_2d(1, pad=0)), (2, 96, 28, 28)),
    "depthwise": (SparseConvCase(random_weight((64, 1, 5, 5), 0.5), geometry_2d(5, 2, 2, group=64)), (3, 64, 56, 56)),
    "float16": (
        SparseConvCase(
            random_weight((96, 96, 3, 3), 0.2),
            geometry_2d(),
            Activation.SILU,
            dtype=np.dtype(np.float16),
            has_residual=True,
        ),
        (2, 96, 28, 28),
    ),
    "3-D": (
        SparseConvCase(random_weight((16, 8, 3, 3, 3), 0.3), ConvGeometry((3,) * 3, (1,) * 3, (1,) * 6, (1,) * 3)),
        (2, 8, 12, 16, 16),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_thread_count_does_not_change_a_bit(name):
    case, x_shape = LAYERS[name]
    model, inputs = make_model(case), random_inputs(case, x_shape)
    results = [make_session(model, threads=threads).run(None, inputs)[0].tobytes() for threads in (1, 2, 3, 16)]
    assert len(set(results)) == 1


@pytest.mark.parametrize("name", LAYERS)
def test_batch_does_not_change_a_bit(name):
    case, x_shape = LAYERS[name]
    session, inputs = make_session(make_model(case), threads=2), random_inputs(case, x_shape)
    (together,) = session.run(None, inputs)
    batched = {"X", "Z"} & inputs.keys()
    for image in (0, x_shape[0] - 1):
        (alone,) = session.run(None, {k: v[image : image + 1] if k in batched else v for k, v in inputs.items()})
        assert alone.tobytes() == together[image].tobytes()


def test_the_alignment_of_x_does_not_change_a_bit():
    """An input that does not begin at a cache line may be packed where an aligned one is read in place."""
    case, x_shape = LAYERS["in place"]
    session, inputs = make_session(make_model(case)), random_inputs(case, x_shape)
    x = inputs["X"]
    room = np.empty(x.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64
    results = []
    for shift in (0, 4, 32):
        placed = room[start + shift :][: x.nbytes].view(np.float32).reshape(x.shape)
        placed[:] = x
        results.append(session.run(None, inputs | {"X": placed})[0].tobytes())
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_concurrent_runs_with_changing_shapes(dtype):
    """Eight threads, one session, more shapes than it keeps plans for."""
    case = SparseConvCase(random_weight((24, 16, 3, 3), 0.3), geometry_2d(), dtype=np.dtype(dtype), has_residual=True)
    session = make_session(make_model(case), threads=2)
    inputs = [random_inputs(case, (1 + i % 3, 16, 5 + i, 30 - i), seed=i) for i in range(20)]
    wanted = [session.run(None, fed)[0].tobytes() for fed in inputs]

    def run(worker):
        order = np.random.default_rng(worker).permutation(len(inputs))
        return all(session.run(None, inputs[i])[0].tobytes() == wanted[i] for i in order)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(16)))
    for fed, result in zip(inputs, wanted, strict=True):
        exact, bound = oracle(case, fed)
        assert_within(np.frombuffer(result, dtype).reshape(exact.shape), exact, bound)


def test_concurrent_sessions_come_and_go():
    def run(worker):
        case, x_shape = LAYERS[list(LAYERS)[worker % len(LAYERS)]]
        inputs = random_inputs(case, x_shape, seed=worker)
        (actual,) = make_session(make_model(case), threads=1 + worker % 2).run(None, inputs)
        assert_within(actual, *oracle(case, inputs))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(14)))


# Counts the calls of malloc and its like whose caller lies in the library. It is linked against the C++ runtime
# statically, so the allocations of its C++ code are among them.
COUNTER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static atomic_ulong count;
static uintptr_t begin, end;

static void note(const void* caller) {
  if ((uintptr_t)caller - begin < end - begin) atomic_fetch_add(&count, 1);
}

void* malloc(size_t size) { note(__builtin_return_address(0)); return __libc_malloc(size); }
void* calloc(size_t n, size_t size) { note(__builtin_return_address(0)); return __libc_calloc(n, size); }
void* realloc(void* p, size_t size) { note(__builtin_return_address(0)); return __libc_realloc(p, size); }
void* memalign(size_t a, size_t size) { note(__builtin_return_address(0)); return __libc_memalign(a, size); }
void* aligned_alloc(size_t a, size_t size) { note(__builtin_return_address(0)); return __libc_memalign(a, size); }
int posix_memalign(void** p, size_t a, size_t size) {
  note(__builtin_return_address(0));
  return (*p = __libc_memalign(a, size)) ? 0 : 12;
}

static int find(struct dl_phdr_info* info, size_t size, void* name) {
  (void)size;
  if (!strstr(info->dlpi_name, name)) return 0;
  begin = info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)* header = &info->dlpi_phdr[i];
    uintptr_t last = begin + header->p_vaddr + header->p_memsz;
    if (header->p_type == PT_LOAD && last > end) end = last;
  }
  return 1;
}

int watch_library(char* name) { return dl_iterate_phdr(find, name); }
unsigned long allocations(void) { return atomic_load(&count); }
"""


LATE_RUN = """
import ctypes, threading
from tests.native.test_concurrency import LAYERS
from tests.support.sparse_models import make_model, make_session, random_inputs

case, x_shape = LAYERS["packed by each task"]
session, inputs = make_session(make_model(case)), random_inputs(case, x_shape)
libc, key, results = ctypes.CDLL(None), ctypes.c_uint(), []
run = lambda: results.append(session.run(None, inputs)[0].tobytes())
late = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: run())
assert libc.pthread_key_create(ctypes.byref(key), late) == 0
ended = threading.Thread(target=lambda: (run(), libc.pthread_setspecific(key, ctypes.c_void_p(1))))
ended.start()
ended.join()
while len(results) < 2:
    pass
assert results[0] == results[1]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs POSIX threads")
def test_a_thread_that_ends_may_run_once_more():
    """As a destructor of its own may, after those of the library's objects."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LATE_RUN], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="interposes malloc by LD_PRELOAD")
def test_steady_runs_do_not_allocate(tmp_path, native_library):
    source, counter = tmp_path / "counter.c", tmp_path / "counter.so"
    source.write_text(COUNTER)
    subprocess.run([find_tool("gcc", "cc"), "-shared", "-fPIC", "-O1", "-o", counter, source], check=True)
    script = ROOT / "tests" / "native" / "count_allocations.py"
    done = subprocess.run(
        [sys.executable, script, counter, native_library],
        env={**os.environ, "LD_PRELOAD": str(counter), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 2 * len(LAYERS)
    for line in done.stdout.splitlines():
        creation, first_run, later_runs = (int(word) for word in line.split())
        # That creation and a first run allocate shows that the counter counts.
        assert creation > 0, line
        assert first_run > 0, line
        assert later_runs == 0, line
