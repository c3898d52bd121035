"""Deciding by measurement: every layer timed dense and sparse on this machine, then the model as a whole."""

from onnx_sparseconv.tuner.options import Case, TuneOptions, make_cases
from onnx_sparseconv.tuner.setting import machine_notes
from onnx_sparseconv.tuner.tuning import TuneReport, tune

__all__ = ["Case", "TuneOptions", "TuneReport", "machine_notes", "make_cases", "tune"]
