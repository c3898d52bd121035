"""The networks of benchmarks run at any batch size."""

from __future__ import annotations

import importlib

import numpy as np
import onnxruntime as ort
import pytest

from tests.support.architectures import full_mobilenet_v2, light_model, resnet18, resnet50_v2, vgg16
from tests.support.newer_architectures import efficientnet_b0, mobilenet_v3_large, yolov8n


@pytest.mark.parametrize(
    "make",
    [
        lambda: vgg16(32),
        resnet18,
        lambda: resnet50_v2(64),
        full_mobilenet_v2,
        mobilenet_v3_large,
        efficientnet_b0,
        lambda: yolov8n(64),
        lambda: light_model("resnet50"),
        lambda: light_model("densenet121"),
    ],
)
def test_any_batch_size(make):
    proto = importlib.import_module("networks").with_open_batch(make())
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (image,) = session.get_inputs()
    x = np.random.default_rng(0).standard_normal((3, *image.shape[1:])).astype(np.float32)
    together = session.run(None, {image.name: x})
    alone = session.run(None, {image.name: x[1:2]})
    for of_all, of_one in zip(together, alone, strict=True):
        np.testing.assert_allclose(of_all[1:2], of_one, rtol=1e-3, atol=1e-3 * np.abs(of_one).max())
        assert np.ptp(of_all, axis=0).max() > 0
