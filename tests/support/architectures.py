"""Networks in the patterns of well-known architectures, small, as PyTorch's exporter writes them; and the real ones.

Weights are random, nine in ten of them zero, so that a network's numbers are worth nothing and its graph everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from tests.support.odd_models import model, pruned, tensor, value

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
OPSET = 17


class Network:
    """Writes a network layer by layer; the last tensor is the input of the next layer."""

    def __init__(self, channels: int, size: int, *, sparsity: float = 0.9) -> None:
        self.input = value("X", ["N", channels, size, size])
        self.channels, self.last = channels, "X"
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        self._sparsity = sparsity
        self._rng = np.random.default_rng(0)

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [f"{name}_out"], name=name, **attributes))
        self.last = f"{name}_out"
        return self.last

    def constant(self, values: Any) -> str:
        name = f"constant{len(self.constants)}"
        self.constants[name] = np.asarray(values)
        return name

    def conv(
        self,
        out_channels: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        group: int = 1,
        bias: bool = False,
        gain: float = 1.0,
    ) -> str:
        shape = (out_channels, self.channels // group, kernel, kernel)
        depthwise = group == self.channels
        weight = pruned(shape, 0 if depthwise else self._sparsity, seed=len(self.nodes))
        weight *= np.float32(gain * np.sqrt(2 / max(1, np.count_nonzero(weight[0]))))
        inputs = [self.last, self.constant(weight)]
        if bias:
            inputs.append(self.constant(self._rng.standard_normal(out_channels).astype(np.float32) * np.float32(0.1)))
        self.channels = out_channels
        return self.add("Conv", *inputs, pads=[kernel // 2] * 4, strides=[stride] * 2, group=group)

    def norm(self) -> str:
        low, high = [0.8, -0.1, -0.1, 0.8], [1.2, 0.1, 0.1, 1.2]
        draws = [self._rng.uniform(a, b, self.channels).astype(np.float32) for a, b in zip(low, high, strict=True)]
        return self.add("BatchNormalization", self.last, *(self.constant(d) for d in draws), epsilon=1e-5)

    def relu(self) -> str:
        return self.add("Relu", self.last)

    def relu6(self) -> str:
        bounds = [self.constant(np.float32(0)), self.constant(np.float32(6))]
        return self.add("Clip", self.last, *bounds)

    def finish(self, *, classes: int | None = None) -> ModelProto:
        self.add("GlobalAveragePool", self.last)
        self.add("Flatten", self.last)
        if classes is not None:
            weight = self._rng.standard_normal((classes, self.channels), np.float32) / np.float32(
                np.sqrt(self.channels)
            )
            self.add("Gemm", self.last, self.constant(weight), transB=1)
        constants = [tensor(v, n) for n, v in self.constants.items()]
        return model(self.nodes, constants, [self.input], [value(self.last, ["N", None])], opset=OPSET)


def vgg() -> ModelProto:
    """Three stages of two Conv with bias and Relu, and MaxPool."""
    network = Network(3, 32)
    for channels in (32, 64, 64):
        for _ in range(2):
            network.conv(channels, bias=True)
            network.relu()
        network.add("MaxPool", network.last, kernel_shape=[2, 2], strides=[2, 2])
    return network.finish()


def vgg16(size: int = 224) -> ModelProto:
    """VGG-16 at its full width: thirteen Conv with bias and Relu, five MaxPool, three Gemm."""
    network = Network(3, size)
    for channels, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            network.conv(channels, bias=True)
            network.relu()
        network.add("MaxPool", network.last, kernel_shape=[2, 2], strides=[2, 2])
    network.add("Flatten", network.last)
    rng, features = np.random.default_rng(0), 512 * (size // 32) ** 2
    for out_features in (4096, 4096, 1000):
        weight = rng.standard_normal((out_features, features), np.float32) * np.float32(np.sqrt(2 / features))
        bias = np.zeros(out_features, np.float32)
        network.add("Gemm", network.last, network.constant(weight), network.constant(bias), transB=1)
        if out_features != 1000:
            network.relu()
        features = out_features
    constants = [tensor(v, n) for n, v in network.constants.items()]
    return model(network.nodes, constants, [network.input], [value(network.last, ["N", 1000])], opset=OPSET)


def resnet() -> ModelProto:
    """A stem, and two stages of two bottlenecks whose BatchNormalization nobody has folded."""
    network = Network(3, 32)
    _pooled_stem(network, 32)
    for width, stride in ((32, 1), (32, 2)):
        for block in range(2):
            entry, channels = network.last, network.channels
            for kernel, out_channels in ((1, width), (3, width)):
                network.conv(out_channels, kernel, stride=stride if kernel == 3 and block == 0 else 1)
                network.norm()
                network.relu()
            network.conv(2 * width, 1)
            main = network.norm()
            if block == 0:
                network.last, network.channels = entry, channels
                network.conv(2 * width, 1, stride=stride)
                entry = network.norm()
            network.add("Add", main, entry)
            network.relu()
    return network.finish()


def _pooled_stem(network: Network, channels: int) -> None:
    """As ResNets begin: a 7x7 Conv with a stride of 2, and MaxPool."""
    network.conv(channels, 7, stride=2)
    network.norm()
    network.relu()
    network.add("MaxPool", network.last, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)


def densenet() -> ModelProto:
    """A stem, and two blocks of three layers with a transition between: BatchNormalization stands before the Conv."""
    network = Network(3, 32)
    network.conv(32, 7, stride=2)
    network.norm()
    network.relu()
    for block in range(2):
        for _ in range(3):
            entry, channels = network.last, network.channels
            for kernel, out_channels in ((1, 32), (3, 16)):
                network.norm()
                network.relu()
                network.conv(out_channels, kernel)
            network.add("Concat", entry, network.last, axis=1)
            network.channels = channels + 16
        network.norm()
        network.relu()
        if block == 0:
            network.conv(32, 1)
            network.add("AveragePool", network.last, kernel_shape=[2, 2], strides=[2, 2])
    return network.finish()


def resnet18() -> ModelProto:
    """ResNet-18 at its full width: a stem, eight blocks of two 3x3 Conv, BatchNormalization not folded."""
    network = Network(3, 224)
    _pooled_stem(network, 64)
    for width in (64, 128, 256, 512):
        for block in range(2):
            entry, channels = network.last, network.channels
            stride = 1 if block == 1 or width == 64 else 2
            network.conv(width, stride=stride)
            network.norm()
            network.relu()
            network.conv(width)
            main = network.norm()
            if channels != width:
                network.last, network.channels = entry, channels
                network.conv(width, 1, stride=stride)
                entry = network.norm()
            network.add("Add", main, entry)
            network.relu()
    return network.finish(classes=1000)


def resnet50_v2(size: int = 224) -> ModelProto:
    """ResNet-50 of the second form at its full width: BatchNormalization and Relu stand before each Conv."""
    network = Network(3, size)
    network.conv(64, 7, stride=2)
    network.add("MaxPool", network.last, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(depth):
            entry, channels = network.last, network.channels
            stride = 2 if block == 0 and stage > 0 else 1
            network.norm()
            before = network.relu()
            if block == 0:
                entry = network.conv(4 * width, 1, stride=stride)
                network.last, network.channels = before, channels
            for kernel, step in ((1, 1), (3, stride)):
                network.conv(width, kernel, stride=step)
                network.norm()
                network.relu()
            network.add("Add", network.conv(4 * width, 1), entry)
    network.norm()
    network.relu()
    return network.finish(classes=1000)


def mobilenet_v2() -> ModelProto:
    """A stem and inverted residuals: sparse 1x1 Conv around dense depthwise ones, Clip as Relu6."""
    network = Network(3, 32)
    _inverted_residuals(network, 32, [(3, 32, 1), (3, 48, 2), (2, 48, 1)])
    return network.finish()


def full_mobilenet_v2() -> ModelProto:
    """MobileNetV2 at its full width: seventeen inverted residuals and a last 1x1 Conv."""
    network = Network(3, 224)
    stages = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    blocks = [(wider, channels, stride if i == 0 else 1) for wider, channels, n, stride in stages for i in range(n)]
    _inverted_residuals(network, 32, blocks)
    network.conv(1280, 1)
    network.norm()
    network.relu6()
    return network.finish(classes=1000)


def _inverted_residuals(network: Network, stem: int, blocks: list[tuple[int, int, int]]) -> None:
    """A stem with a stride of 2, and blocks: how much wider inside, channels, stride."""
    network.conv(stem, 3, stride=2)
    network.norm()
    network.relu6()
    for wider, channels, stride in blocks:
        entry, before = network.last, network.channels
        inner = wider * before
        if wider != 1:
            network.conv(inner, 1)
            network.norm()
            network.relu6()
        network.conv(inner, 3, stride=stride, group=inner)
        network.norm()
        network.relu6()
        network.conv(channels, 1)
        main = network.norm()
        if stride == 1 and before == channels:
            network.add("Add", entry, main)


def half(proto: ModelProto) -> ModelProto:
    """The network in float16."""
    for stored in proto.graph.initializer:
        if stored.data_type == onnx.TensorProto.FLOAT:
            stored.CopyFrom(tensor(numpy_helper.to_array(stored).astype(np.float16), stored.name))
    for info in (*proto.graph.input, *proto.graph.output):
        info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return proto


def light_model(name: str, *, thinner: int = 4) -> ModelProto:
    """One of onnx's light models: the real graph, with random weights instead of constant ones.

    Args:
        name: as in its file's name.
        thinner: what the numbers of channels are divided by.
    """
    proto = onnx.load(str(LIGHT / f"light_{name}.onnx"))
    stored = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    shapes = {n: a.shape for n, a in stored.items() if a.dtype == np.float32}
    filled = [node for node in proto.graph.node if node.op_type == "ConstantOfShape"]
    shapes |= {node.output[0]: tuple(stored[node.input[0]].tolist()) for node in filled}
    kept = [node for node in proto.graph.node if node.op_type != "ConstantOfShape"]
    arrays = {n: a for n, a in stored.items() if n not in shapes and n not in {node.input[0] for node in filled}}
    arrays = {n: _thinner(a, thinner) for n, a in arrays.items()}
    scales = _names_of_scales(kept)
    rng = np.random.default_rng(0)
    for weight_name, full_shape in shapes.items():
        shape = tuple(_thinner(np.array(full_shape, np.int64), thinner).tolist())
        if len(shape) == 4:
            values = pruned(shape, 0.9, seed=len(arrays)) * np.sqrt(20 / np.prod(shape[1:]))
        elif weight_name in scales:
            values = rng.uniform(0.7, 1.1, shape)
        else:
            values = rng.standard_normal(shape) * 0.1
        arrays[weight_name] = values.astype(np.float32)
    del proto.graph.node[:], proto.graph.value_info[:], proto.graph.initializer[:]
    proto.graph.node.extend(kept)
    proto.graph.initializer.extend(tensor(a, n) for n, a in arrays.items())
    if kept[-1].op_type == "Softmax":  # it would hide differences
        proto.graph.output[0].name = kept[-1].input[0]
        del proto.graph.node[-1]
    image = next(i for i in proto.graph.input if len(i.type.tensor_type.shape.dim) == 4 and i.name not in arrays)
    del proto.graph.input[:]
    proto.graph.input.append(image)
    proto.graph.input.extend(
        value(n, list(a.shape), helper.np_dtype_to_tensor_dtype(a.dtype)) for n, a in arrays.items()
    )
    return proto


def _thinner(shape: np.ndarray[Any, Any], by: int) -> np.ndarray[Any, Any]:
    """A shape with fewer channels; classes stay, and so do kernels and colours."""
    return np.where((shape >= 32) & (shape != 1000), shape // by, shape)


def _names_of_scales(nodes: list[NodeProto]) -> set[str]:
    """Constants that multiply or divide: they should be about 1."""
    names = {node.input[i] for node in nodes if node.op_type == "BatchNormalization" for i in (1, 4)}
    factors = {name for node in nodes if node.op_type == "Mul" for name in node.input}
    return names | {node.input[0] for node in nodes if node.op_type == "Unsqueeze" and node.output[0] in factors}
