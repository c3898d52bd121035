"""Deciding by measurement: every layer timed dense and sparse on this machine, then the model as a whole."""

from onnx_sparseconv.tuner.options import Case, TuneOptions
from onnx_sparseconv.tuner.tuning import TuneReport, tune

__all__ = ["Case", "TuneOptions", "TuneReport", "tune"]
