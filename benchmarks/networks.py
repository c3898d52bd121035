"""Writes whole networks for benchmarks: real architectures at full size, random weights, nine in ten of them zero.

    python benchmarks/networks.py build/networks --networks vgg16 resnet50

What they compute is worth nothing; how long they take depends on shapes and zeros alone. ResNet-50,
DenseNet-121, VGG-19 and SqueezeNet are the graphs of onnx's light models, the others are written as PyTorch's exporter
does. Depthwise convolutions keep all their weights. The batch is open.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import ModelProto

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.architectures import full_mobilenet_v2, light_model, resnet18, resnet50_v2, vgg16
from tests.support.newer_architectures import efficientnet_b0, mobilenet_v3_large, yolov8n


def _light(name: str) -> Callable[[], ModelProto]:
    return lambda: light_model(name, thinner=1)


NETWORKS: dict[str, Callable[[], ModelProto]] = {
    "vgg16": vgg16,
    "resnet18": resnet18,
    "resnet50": _light("resnet50"),
    "resnet50_v2": resnet50_v2,
    "densenet121": _light("densenet121"),
    "mobilenet_v2": full_mobilenet_v2,
    "mobilenet_v3_large": mobilenet_v3_large,
    "efficientnet_b0": efficientnet_b0,
    "yolov8n": yolov8n,
    "vgg19": _light("vgg19"),
    "squeezenet": _light("squeezenet"),
}


def with_open_batch(model: ModelProto) -> ModelProto:
    """The model with weights that are no inputs, for any batch size."""
    stored = {tensor.name for tensor in model.graph.initializer}
    images = [info for info in model.graph.input if info.name not in stored]
    del model.graph.input[:]
    model.graph.input.extend(images)
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "N"
    for node in model.graph.node:
        if node.op_type == "Reshape":
            _open_reshape(model, node.input[1])
    model.ir_version = max(model.ir_version, 4)
    return model


def _open_reshape(model: ModelProto, name: str) -> None:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            sizes = onnx.numpy_helper.to_array(tensor).copy()
            sizes[0] = 0 if -1 in sizes[1:] else -1
            tensor.CopyFrom(onnx.numpy_helper.from_array(sizes, name))


def main() -> int:
    """Write the networks that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.networks:
        onnx.save(with_open_batch(NETWORKS[name]()), str(options.folder / f"{name}.onnx"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
