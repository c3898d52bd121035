"""From a model file to a converted one, and back: load, analyse, decide, rewrite, check, save."""

from onnx_sparseconv.converter.analyse import inspect
from onnx_sparseconv.converter.conversion import ConvertOptions, convert
from onnx_sparseconv.converter.decide import DecisionOptions
from onnx_sparseconv.converter.decisions import Decisions, read_decisions, write_decisions
from onnx_sparseconv.converter.pruning import prune
from onnx_sparseconv.converter.restoration import restore

__all__ = [
    "ConvertOptions",
    "DecisionOptions",
    "Decisions",
    "convert",
    "inspect",
    "prune",
    "read_decisions",
    "restore",
    "write_decisions",
]
