"""What the benchmark asks of CuPy, cuBLAS and cuSPARSE, answered by fakes that follow their manuals."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest

from tests.benchmarks.emulated_device import reference, size_of
from tests.benchmarks.fake_cupy import FakeCuda

_TF32, _FLOAT32 = 77, 68


@pytest.fixture
def cuda(monkeypatch):
    import cupy_device

    made = FakeCuda()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cupy_device, "loaded_library", made.library)
    return made


@pytest.fixture
def memory():
    from device_memory import HostMemory

    return HostMemory()


class _Layer:
    """A layer on the fake GPU, with its reference."""

    def __init__(self, memory, dtype, **changes):
        from cupy_device import CupyDevice
        from layers import make_weights
        from lowered_runs import LoweredLayer
        from lowering import Lowering
        from suite_rows import Layer

        sizes = {"in_channels": 3, "out_channels": 5, "height": 6, "width": 8, "kernel": 3, "stride": 1, "pad": 1}
        self.layer = Layer("layer", group=1, **{**sizes, **changes})
        self.memory, self.dtype, lowering = memory, np.dtype(dtype), Lowering.of(self.layer)
        x = np.random.default_rng(0).standard_normal((4, self.layer.in_channels, *self.layer.spatial)).astype(dtype)
        weights = make_weights(self.layer, 0.5, dtype)
        self.wanted = reference(x, weights, self.layer)
        self.device = CupyDevice(memory, lowering, self.dtype)
        self.places = [(self.device.upload(x), memory.allocate(size_of(self.wanted.shape, dtype))) for _ in range(2)]
        self.lowered = LoweredLayer(self.device, lowering, weights, 4, places=self.places)

    def check(self, runs):
        for _, y in self.places:
            self.memory.fill(y, size_of(self.wanted.shape, self.dtype), 0xFF)
            runs()
            got = self.memory.read(y, self.wanted.shape, self.dtype)
            bound = 1e-5 if self.dtype == np.float32 else 2e-2
            np.testing.assert_allclose(got.astype(np.float64), self.wanted, atol=bound)


@pytest.mark.parametrize("changes", [{}, {"kernel": 1, "pad": 0, "in_channels": 8}], ids=["3x3", "1x1"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("can_capture", [True, False])
def test_products_are_right_in_graphs_and_without(cuda, memory, dtype, can_capture, changes):
    from cupy_device import SPARSE_ALGORITHMS
    from lowering import LoweringPlan

    cuda.can_capture = can_capture
    layer = _Layer(memory, dtype, **changes)
    plans = {*layer.lowered.dense_plans(), *(LoweringPlan(x, n) for x in ("batched", "joined") for n in (1, 2, 4))}
    for plan in plans:
        runs = layer.lowered.dense_runs(plan)
        assert runs.mode == ("graph" if can_capture else "stream")
        layer.check(runs)
    for plan in layer.lowered.sparse_plans(SPARSE_ALGORITHMS):
        layer.check(layer.lowered.sparse_runs(plan))
    assert layer.device.versions == {"cupy": "0", "cublas": "1", "cusparse": "2"}
    layer.device.close()
    assert not cuda.descriptors


def test_what_was_recorded_runs_on_after_a_capture_that_fails(cuda, memory):
    layer = _Layer(memory, "float32")
    (plan, *_) = layer.lowered.dense_plans()
    recorded = layer.lowered.dense_runs(plan)
    cuda.can_capture = False
    assert layer.lowered.sparse_runs(layer.lowered.sparse_plans((6,))[0]).mode == "stream"
    layer.check(recorded)


def test_floats_are_rounded_to_tf32_only_where_they_may_be(cuda, memory):
    layer = _Layer(memory, "float32")
    (plan, *_) = layer.lowered.dense_plans()
    for tf32, wanted in ((True, _TF32), (False, _FLOAT32)):
        cuda.computed_with.clear()
        layer.lowered.dense_runs(plan, tf32=tf32)
        assert set(cuda.computed_with) == {wanted}
    halves = _Layer(memory, "float16")
    cuda.computed_with.clear()
    halves.lowered.dense_runs(plan)
    assert set(cuda.computed_with) == {_FLOAT32}


def test_bursts_run_on_all_copies_in_turn(cuda, memory):  # noqa: ARG001
    layer = _Layer(memory, "float32")
    runs = layer.lowered.dense_runs(layer.lowered.dense_plans()[0])
    for _, y in layer.places:
        memory.fill(y, size_of(layer.wanted.shape, "float32"), 0xFF)
    runs.burst(2)
    for _, y in layer.places:
        assert not np.isnan(memory.read(y, layer.wanted.shape, np.dtype(np.float32))).any()


def test_a_library_that_refuses_is_told(cuda, memory):
    from cupy_device import LibraryCallError

    layer = _Layer(memory, "float32")
    cuda.status = 14
    with pytest.raises(LibraryCallError, match="cublasGemmStridedBatchedEx gives status 14"):
        layer.lowered.dense_runs(layer.lowered.dense_plans()[0])
    with pytest.raises(LibraryCallError, match="cusparseSpMM gives status 14"):
        layer.lowered.sparse_runs(layer.lowered.sparse_plans((6,))[0])


def test_libraries_are_found_where_they_are_loaded():
    from cupy_device import LibraryCallError, loaded_library

    assert loaded_library("c").getpid() > 0
    with pytest.raises(LibraryCallError, match="libcublas is not loaded"):
        loaded_library("cublas")


class _FakeDriver:
    """The driver's functions on host memory; ``failing`` gives an error."""

    def __init__(self, failing=""):
        from device_memory import HostMemory

        self.host, self.failing, self.freed = HostMemory(), failing, []

    def __getattr__(self, name):
        if name == self.failing:
            return lambda *_: 2
        if f"_{name}" in type(self).__dict__:
            return getattr(self, f"_{name}")
        return lambda *_: 0

    def _cuMemAlloc_v2(self, pointer, size):  # noqa: N802
        pointer._obj.value = self.host.allocate(size.value)
        return 0

    def _cuMemFree_v2(self, pointer):  # noqa: N802
        self.freed.append(pointer.value)
        return 201

    def _cuMemcpyHtoD_v2(self, to, source, size):  # noqa: N802
        ctypes.memmove(to.value, source.value, size.value)
        return 0

    def _cuMemcpyDtoH_v2(self, to, source, size):  # noqa: N802
        return self._cuMemcpyHtoD_v2(to, source, size)

    def _cuMemcpyDtoD_v2(self, to, source, size):  # noqa: N802
        return self._cuMemcpyHtoD_v2(to, source, size)

    def _cuMemsetD8_v2(self, to, byte, size):  # noqa: N802
        ctypes.memset(to.value, byte.value, size.value)
        return 0


@pytest.mark.parametrize("kind", ["gpu", "host"])
def test_memory_is_written_copied_filled_and_read(kind, monkeypatch):
    import device_memory

    driver = _FakeDriver()
    monkeypatch.setattr(device_memory.ctypes, "CDLL", lambda _: driver)
    memory = device_memory.GpuMemory() if kind == "gpu" else device_memory.HostMemory()
    values = np.arange(24, dtype=np.float16).reshape(2, 3, 4)[:, ::2]
    address = device_memory.upload(memory, values)
    other = memory.allocate(values.nbytes)
    memory.copy(other, address, values.nbytes)
    np.testing.assert_array_equal(memory.read(other, values.shape, values.dtype), values)
    memory.fill(other, values.nbytes // 2, device_memory.POISON)
    half = memory.read(other, values.shape, values.dtype)
    assert np.isnan(half[0]).all()
    np.testing.assert_array_equal(half[1], values[1])
    assert address % 256 == other % 256 == 0
    memory.close()
    if kind == "gpu":
        assert sorted(driver.freed) == sorted([address, other])


def test_a_driver_that_refuses_or_is_missing_is_told(monkeypatch):
    import device_memory

    driver = _FakeDriver(failing="cuMemAlloc_v2")
    monkeypatch.setattr(device_memory.ctypes, "CDLL", lambda _: driver)
    with pytest.raises(device_memory.DeviceMemoryError, match="cuMemAlloc_v2 gives CUDA error 2"):
        device_memory.GpuMemory().allocate(5)

    def missing(_):
        raise OSError("no such file")

    monkeypatch.setattr(device_memory.ctypes, "CDLL", missing)
    with pytest.raises(device_memory.DeviceMemoryError, match="no NVIDIA driver"):
        device_memory.GpuMemory()
