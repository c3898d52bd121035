"""Networks of today at their full width, as PyTorch's exporter writes them: gates by channels, SiLU and HardSwish.

Weights as in `architectures`. YOLOv8n is written with its BatchNormalization folded, as its own exporter does, and ends
at the maps of its heads: what decodes them has no convolution that could be pruned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from tests.support.architectures import OPSET, Network
from tests.support.odd_models import model, tensor, value


def _activate(network: Network, activation: str) -> str:
    if activation != "SiLU":
        return network.add(activation, network.last)
    entry = network.last
    return network.add("Mul", entry, network.add("Sigmoid", entry))


def _norm_and_activate(network: Network, activation: str) -> None:
    network.norm()
    _activate(network, activation)


def _gate(network: Network, squeezed: int, activation: str, **gate: float) -> None:
    """Squeeze and excitation: scales each channel by what the means of all channels say.

    Args:
        network: what is written; its last tensor is scaled.
        squeezed: channels between.
        activation: behind the first convolution.
        gate: attributes of the HardSigmoid behind the second; none for a Sigmoid.
    """
    entry, channels = network.last, network.channels
    network.add("GlobalAveragePool", entry)
    network.conv(squeezed, 1, bias=True)
    _activate(network, activation)
    network.conv(channels, 1, bias=True)
    network.add("HardSigmoid" if gate else "Sigmoid", network.last, **gate)
    network.add("Mul", network.last, entry)


@dataclass(frozen=True)
class Inverted:
    """An inverted residual: `inner` channels inside, `squeezed` ones in its gate (0: it has none)."""

    inner: int
    out_channels: int
    kernel: int
    stride: int
    activation: str
    squeezed: int = 0


def _inverted_residual(network: Network, block: Inverted) -> None:
    entry, before = network.last, network.channels
    if block.inner != before:
        network.conv(block.inner, 1)
        _norm_and_activate(network, block.activation)
    network.conv(block.inner, block.kernel, stride=block.stride, group=block.inner)
    _norm_and_activate(network, block.activation)
    if block.squeezed and block.activation == "SiLU":
        _gate(network, block.squeezed, "SiLU")
    elif block.squeezed:
        _gate(network, block.squeezed, "Relu", alpha=1 / 6, beta=0.5)
    # Gates and SiLU let a part through: without more here, nothing would be left of the images at the end.
    network.conv(block.out_channels, 1, gain=1.5 if block.activation == "SiLU" else 1.0)
    main = network.norm()
    if block.stride == 1 and before == block.out_channels:
        network.add("Add", main, entry)


def efficientnet_b0() -> ModelProto:
    """EfficientNet-B0: sixteen inverted residuals with gates, SiLU."""
    network = Network(3, 224)
    network.conv(32, stride=2)
    _norm_and_activate(network, "SiLU")
    stages = [
        (1, 16, 3, 1, 1),
        (6, 24, 3, 2, 2),
        (6, 40, 5, 2, 2),
        (6, 80, 3, 2, 3),
        (6, 112, 5, 1, 3),
        (6, 192, 5, 2, 4),
        (6, 320, 3, 1, 1),
    ]
    for wider, channels, kernel, stride, blocks in stages:
        for i in range(blocks):
            before = network.channels
            inverted = Inverted(wider * before, channels, kernel, stride if i == 0 else 1, "SiLU", before // 4)
            _inverted_residual(network, inverted)
    network.conv(1280, 1)
    _norm_and_activate(network, "SiLU")
    return network.finish(classes=1000)


def mobilenet_v3_large() -> ModelProto:
    """MobileNetV3-Large: fifteen inverted residuals, eight of them with gates; Relu in front, HardSwish behind."""
    network = Network(3, 224)
    network.conv(16, stride=2)
    _norm_and_activate(network, "HardSwish")
    for block in (
        Inverted(16, 16, 3, 1, "Relu"),
        Inverted(64, 24, 3, 2, "Relu"),
        Inverted(72, 24, 3, 1, "Relu"),
        Inverted(72, 40, 5, 2, "Relu", 24),
        Inverted(120, 40, 5, 1, "Relu", 32),
        Inverted(120, 40, 5, 1, "Relu", 32),
        Inverted(240, 80, 3, 2, "HardSwish"),
        Inverted(200, 80, 3, 1, "HardSwish"),
        Inverted(184, 80, 3, 1, "HardSwish"),
        Inverted(184, 80, 3, 1, "HardSwish"),
        Inverted(480, 112, 3, 1, "HardSwish", 120),
        Inverted(672, 112, 3, 1, "HardSwish", 168),
        Inverted(672, 160, 5, 2, "HardSwish", 168),
        Inverted(960, 160, 5, 1, "HardSwish", 240),
        Inverted(960, 160, 5, 1, "HardSwish", 240),
    ):
        _inverted_residual(network, block)
    network.conv(960, 1)
    _norm_and_activate(network, "HardSwish")
    return network.finish(classes=1000)


def yolov8n(size: int = 640) -> ModelProto:
    """YOLOv8n for 80 classes: backbone, pyramid, and heads at three sizes, each with 64 + 80 channels; SiLU.

    Args:
        size: height and width of the images in pixels, a multiple of 32.
    """
    network = Network(3, size)
    levels: list[tuple[str, int]] = []
    _conv_silu(network, 16, stride=2)
    for channels, blocks in ((32, 1), (64, 2), (128, 2), (256, 1)):
        _conv_silu(network, channels, stride=2)
        _split_bottlenecks(network, channels, blocks, adds=True)
        levels.append((network.last, network.channels))
    _pyramid_pool(network)
    deepest = network.last, network.channels
    _upsample_and_join(network, levels[2])
    _split_bottlenecks(network, 128, 1)
    middle = network.last, network.channels
    _upsample_and_join(network, levels[1])
    _split_bottlenecks(network, 64, 1)
    heads = [(network.last, network.channels)]
    for channels, joined in ((128, middle), (256, deepest)):
        _conv_silu(network, network.channels, stride=2)
        _join(network, joined)
        _split_bottlenecks(network, channels, 1)
        heads.append((network.last, network.channels))
    outputs = [_head(network, head) for head in heads]
    constants = [tensor(values, name) for name, values in network.constants.items()]
    shapes = [["N", 144, size // stride, size // stride] for stride in (8, 16, 32)]
    ends = [value(name, shape) for name, shape in zip(outputs, shapes, strict=True)]
    return model(network.nodes, constants, [network.input], ends, opset=OPSET)


def _conv_silu(network: Network, channels: int, kernel: int = 3, *, stride: int = 1) -> None:
    network.conv(channels, kernel, stride=stride, bias=True)
    _activate(network, "SiLU")


def _split_bottlenecks(network: Network, channels: int, blocks: int, *, adds: bool = False) -> None:
    """C2f: half of the channels go through bottlenecks, and all that there was on the way is joined."""
    half = channels // 2
    _conv_silu(network, channels, 1)
    sizes = network.constant(np.array([half, half]))
    network.add("Split", network.last, sizes, axis=1)
    node = network.nodes[-1]
    node.output[:] = [f"{node.name}_{i}" for i in range(2)]
    parts = list(node.output)
    network.channels, network.last = half, parts[-1]
    for _ in range(blocks):
        entry = network.last
        _conv_silu(network, half)
        _conv_silu(network, half)
        if adds:
            network.add("Add", entry, network.last)
        parts.append(network.last)
    network.add("Concat", *parts, axis=1)
    network.channels = half * len(parts)
    _conv_silu(network, channels, 1)


def _pyramid_pool(network: Network) -> None:
    """SPPF: three MaxPool of 5x5, one behind the other, joined."""
    channels = network.channels
    _conv_silu(network, channels // 2, 1)
    parts = [network.last]
    for _ in range(3):
        parts.append(network.add("MaxPool", network.last, kernel_shape=[5, 5], strides=[1, 1], pads=[2] * 4))
    network.add("Concat", *parts, axis=1)
    network.channels *= 4
    _conv_silu(network, channels, 1)


def _upsample_and_join(network: Network, other: tuple[str, int]) -> None:
    scales = network.constant(np.array([1, 1, 2, 2], np.float32))
    network.add("Resize", network.last, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric")
    _join(network, other)


def _join(network: Network, other: tuple[str, int]) -> None:
    network.add("Concat", network.last, other[0], axis=1)
    network.channels += other[1]


def _head(network: Network, entry: tuple[str, int]) -> str:
    """Boxes (64 channels) and classes (80), joined."""
    parts = []
    for channels, out_channels in ((64, 64), (80, 80)):
        network.last, network.channels = entry
        _conv_silu(network, channels)
        _conv_silu(network, channels)
        network.conv(out_channels, 1, bias=True)
        parts.append(network.last)
    return network.add("Concat", *parts, axis=1)
