from __future__ import annotations

import itertools

import pytest

from onnx_sparseconv.errors import ProviderError
from onnx_sparseconv.runtime.peaks import measure_cpu, peaks_of_gpu

# What the driver says of an H200: clock in kHz, multiprocessors, memory clock in kHz, bus in bits, compute capability.
H200 = {13: 1_980_000, 16: 132, 36: 3_201_000, 37: 6016, 75: 9, 76: 0}


class _Clock:
    """Every call of it takes some nanoseconds, in turn."""

    def __init__(self, *steps):
        self._steps, self._now = itertools.cycle(steps), 0

    def __call__(self):
        self._now += next(self._steps)
        return self._now


def test_the_fastest_run_counts():
    # When it began; before and after each of five runs; whether there is time left.
    steps = [0, 0, 2000, 0, 3000, 0, 4000, 0, 500, 0, 9000, 0]
    peaks = measure_cpu(1, matrix_sizes=(8,), stream_elements=16, seconds=0, clock=_Clock(*steps))
    assert peaks.flops_per_s == pytest.approx(2 * 8**3 / 500e-9)


def test_of_several_sizes_the_best_counts():
    peaks = measure_cpu(1, matrix_sizes=(8, 16), stream_elements=16, seconds=0, clock=_Clock(100))
    assert peaks.flops_per_s == pytest.approx(2 * 16**3 / 100e-9)
    assert peaks.bytes_per_s == pytest.approx(2 * 4 * 16 / 100e-9)


def test_it_ends_when_the_time_is_up():
    clock = _Clock(10**8)
    measure_cpu(1, matrix_sizes=(8,), stream_elements=16, seconds=3, clock=clock)
    assert 6e9 < clock() < 8e9


def test_a_real_measurement():
    peaks = measure_cpu(1, matrix_sizes=(128,), stream_elements=2**16, seconds=0.01)
    assert 1e8 < peaks.flops_per_s < 1e14
    assert 1e7 < peaks.bytes_per_s < 1e14
    assert "measured" in peaks.text


def test_a_gpu_by_what_its_driver_says():
    peaks = peaks_of_gpu(H200)
    assert peaks.flops_per_s == pytest.approx(66.9e12, rel=0.01)  # NVIDIA's data sheet: 67 TFLOPS
    assert peaks.bytes_per_s == pytest.approx(4.8e12, rel=0.01)  # 4.8 TB/s


@pytest.mark.parametrize(
    ("capability", "lanes"), [((7, 5), 64), ((8, 0), 64), ((8, 6), 128), ((8, 7), 128), ((12, 0), 128)]
)
def test_lanes_of_a_multiprocessor(capability, lanes):
    peaks = peaks_of_gpu({**H200, 75: capability[0], 76: capability[1]})
    assert peaks.flops_per_s == 2 * lanes * 132 * 1.98e9


@pytest.mark.parametrize("missing", [13, 16, 36, 37, 75])
def test_what_the_driver_does_not_say_is_not_made_up(missing):
    for attributes in ({**H200, missing: 0}, {k: v for k, v in H200.items() if k != missing}):
        with pytest.raises(ProviderError, match="does not say"):
            peaks_of_gpu(attributes)
