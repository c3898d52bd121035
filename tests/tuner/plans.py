"""Presets that take no time, for tests that need real sessions but no good figures."""

from __future__ import annotations

from onnx_sparseconv.runtime.timing import TimingPlan
from onnx_sparseconv.tuner.options import PRESETS, Preset

ONCE = TimingPlan(warmup=0, min_rounds=1, max_rounds=1, runs_per_round=1, seconds=0)
FAST = {name: Preset(name, ONCE, ONCE, 1, preset.max_steps, preset.skip_hopeless) for name, preset in PRESETS.items()}
