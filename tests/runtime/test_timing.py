from __future__ import annotations

import pytest

from onnx_sparseconv.runtime.timing import Samples, TimingPlan, measure, speedup, summarise


class Machine:
    """A clock that advances by what the candidates cost, slowed down while ``slow`` says so."""

    def __init__(self, slow=lambda _now: 1):
        self.now_ns = 0
        self.calls: list[str] = []
        self.slow = slow

    def clock(self):
        return self.now_ns

    def candidate(self, name, time_us, cold_us=0):
        def run():
            cold = cold_us if not self.calls or self.calls[-1] != name else 0
            self.calls.append(name)
            self.now_ns += int((time_us + cold) * 1000 * self.slow(self.now_ns))

        return run


def test_times_are_what_the_clock_says():
    machine = Machine()
    plan = TimingPlan(warmup=2, min_rounds=3, max_rounds=3, runs_per_round=4)
    (samples,) = measure([machine.candidate("a", 250)], plan, clock=machine.clock)
    assert samples.all_us == (250.0,) * 12
    assert len(machine.calls) == 2 + 3 * (1 + 4)


def test_rounds_take_turns_and_change_the_order():
    machine = Machine()
    plan = TimingPlan(warmup=0, min_rounds=2, max_rounds=2, runs_per_round=1)
    measure([machine.candidate("a", 1), machine.candidate("b", 1)], plan, clock=machine.clock)
    assert "".join(machine.calls) == "aabb" + "bbaa"


def test_the_first_run_after_the_other_candidate_does_not_count():
    machine = Machine()
    plan = TimingPlan(warmup=0, min_rounds=4, max_rounds=4, runs_per_round=2)
    first, second = measure(
        [machine.candidate("a", 10, cold_us=500), machine.candidate("b", 20)], plan, clock=machine.clock
    )
    assert set(first.all_us) == {10.0}
    assert set(second.all_us) == {20.0}


def test_what_comes_before_a_counted_run_is_not_timed():
    machine = Machine()
    plan = TimingPlan(warmup=1, min_rounds=2, max_rounds=2, runs_per_round=2)
    first, second = measure(
        [machine.candidate("a", 10, cold_us=5), machine.candidate("b", 20, cold_us=5)],
        plan,
        clock=machine.clock,
        before=machine.candidate("other", 1000),
    )
    assert (set(first.all_us), set(second.all_us)) == ({15.0}, {25.0})
    assert machine.calls.count("other") == 2 * 2 * 2


def test_measuring_ends_in_time_but_not_before_the_least_number_of_rounds():
    for seconds, rounds in ((0, 5), (1, 10), (1000, 20)):
        machine = Machine()
        plan = TimingPlan(warmup=0, min_rounds=5, max_rounds=20, runs_per_round=9, seconds=seconds)
        seen = []
        (samples,) = measure([machine.candidate("a", 10_000)], plan, clock=machine.clock, on_round=seen.append)
        assert len(samples.rounds_us) == rounds
        assert seen == list(range(1, rounds + 1))


def test_a_slow_minute_of_the_machine_does_not_change_the_verdict():
    machine = Machine(slow=lambda now: 10 if 3_000_000 < now < 6_000_000 else 1)
    plan = TimingPlan(warmup=1, min_rounds=30, max_rounds=30, runs_per_round=3)
    first, second = measure([machine.candidate("a", 100), machine.candidate("b", 50)], plan, clock=machine.clock)
    gain = speedup(first, second)
    assert gain.of_medians == pytest.approx(2)
    assert gain.low == pytest.approx(2)


def test_the_summary():
    stats = summarise([float(t) for t in range(1, 102)])
    assert (stats.mean_us, stats.median_us, stats.p90_us, stats.p99_us) == (51, 51, 91, 100)
    assert (stats.min_us, stats.max_us, stats.num_runs) == (1, 101, 101)


def test_the_speedup_says_how_sure_it_is():
    first = Samples(((100.0,),) * 8 + ((300.0,),) * 2)
    second = Samples(((50.0,),) * 10)
    gain = speedup(first, second)
    assert gain.of_medians == 2
    assert gain.low == 2
    assert gain.high > 2
