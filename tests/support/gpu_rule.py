"""Decisions of the rule for GPUs, as tests of what follows from them want them."""

from __future__ import annotations

from onnx_sparseconv.converter import gpu_predictions, gpu_rule


def let_code_pay(monkeypatch):
    """Generated code is the fastest wherever it can be made: the layers of small models would save microseconds."""
    monkeypatch.setattr(gpu_predictions, "_predict_generated", lambda call, _plan: call.predict(0.01))
    monkeypatch.setattr(gpu_predictions, "_predict_library", lambda _call: None)
    monkeypatch.setattr(gpu_rule, "MIN_SAVED_US", 0.0)


def let_code_lose(monkeypatch):
    """Nothing is faster than dense."""
    monkeypatch.setattr(gpu_predictions, "_predict_generated", lambda call, _plan: call.predict(1e6))
    monkeypatch.setattr(gpu_predictions, "_predict_library", lambda _call: None)
