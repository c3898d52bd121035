"""A small CNN for Fashion-MNIST: trained, then pruned step by step with retraining, then exported to ONNX.

    pip install '.[cpu,train]'
    apt-get install dataset-fashion-mnist          # Debian's package of the data, or give --data
    python examples/fashion_mnist/train.py --out examples/fashion_mnist

Writes ``fashion_mnist.onnx`` (pruned) and ``training.json`` (accuracies on the 10,000 test images, measured with ONNX
Runtime on the exported dense and pruned models, and how they came about). The pruning is gradual magnitude pruning
after Zhu & Gupta (2017): the sparsity follows a cubic schedule, all Conv layers but the first share one magnitude
threshold, and the network trains on between the steps with its zeros held fixed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

CHANNELS = (32, 64, 96, 128, 160)


def read_images(directory: Path, kind: str) -> tuple[Tensor, Tensor]:
    """Images as float in [-0.5, 0.5], ``[N, 1, 28, 28]``, and labels, ``[N]``, from the IDX files of Fashion-MNIST."""
    images = np.frombuffer(gzip.open(directory / f"{kind}-images-idx3-ubyte.gz").read(), np.uint8, offset=16)
    labels = np.frombuffer(gzip.open(directory / f"{kind}-labels-idx1-ubyte.gz").read(), np.uint8, offset=8)
    scaled = images.reshape(-1, 1, 28, 28).astype(np.float32) / 255 - 0.5
    return torch.from_numpy(scaled), torch.from_numpy(labels.astype(np.int64))


def make_network() -> nn.Sequential:
    """Five 3x3 Conv with batch normalisation and ReLU at 28, 14, 14, 7 and 7 pixels, then a linear layer."""
    layers: list[nn.Module] = []
    for index, (before, after) in enumerate(zip((1, *CHANNELS), CHANNELS)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        if index in (0, 2):
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS[-1], 10))


def batches(images: Tensor, labels: Tensor, size: int, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled training batches, half of each mirrored, shifted by up to two pixels."""
    order = torch.randperm(len(images), generator=rng)
    for start in range(0, len(order) - size + 1, size):
        index = order[start : start + size]
        x = images[index].clone()
        x[: size // 2] = x[: size // 2].flip(3)
        shift = torch.randint(-2, 3, (2,), generator=rng).tolist()
        yield torch.roll(x, shift, (2, 3)), labels[index]


class Masks:
    """The zeros of the pruned weights: found by magnitude over all of them together, and held fixed while training."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        self.masks = [torch.ones_like(w) for w in weights]

    @torch.no_grad()
    def prune_to(self, sparsity: float) -> None:
        """Zero the smallest weights until the share of zeros is ``sparsity``."""
        magnitudes = torch.cat([w.abs().flatten() for w in self.weights])
        threshold = magnitudes.kthvalue(max(1, round(sparsity * magnitudes.numel()))).values
        self.masks = [(w.abs() > threshold).to(w.dtype) for w in self.weights]
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Set the masked weights to zero again after an optimiser step."""
        for weight, mask in zip(self.weights, self.masks):
            weight.mul_(mask)


def train_epoch(
    net: nn.Module,
    data: tuple[Tensor, Tensor],
    optimiser: torch.optim.Optimizer,
    rate: float,
    masks: Masks,
    rng: torch.Generator,
) -> None:
    """One pass over the training images; the zeros stay zeros."""
    net.train()
    for group in optimiser.param_groups:
        group["lr"] = rate
    for x, y in batches(*data, 128, rng):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y, label_smoothing=0.05).backward()
        optimiser.step()
        masks.apply()


def export(net: nn.Sequential, path: Path) -> None:
    """Write the network as ONNX: batch normalisation folded (scaling a row keeps its zeros), batch size free."""
    net.eval()
    layers = list(net)
    folded: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.BatchNorm2d):
            folded[-1] = fuse_conv_bn_eval(folded[-1], layer)
        else:
            folded.append(layer)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        file = Path(temporary, path.name)
        torch.onnx.export(
            nn.Sequential(*folded).eval(),
            (torch.zeros(1, 1, 28, 28),),
            str(file),
            input_names=["image"],
            output_names=["logits"],
            dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
            opset_version=17,
            dynamo=False,
        )
        file.replace(path)


def accuracy(path: Path, images: Tensor, labels: Tensor) -> float:
    """Share of test images that the exported model gets right in ONNX Runtime."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    predictions = [session.run(None, {"image": x.numpy()})[0].argmax(1) for x in images.split(500)]
    return float((np.concatenate(predictions) == labels.numpy()).mean())


def commit() -> str:
    """The commit that is checked out, or an empty text."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sparsity", type=float, default=0.95, help="share of zeros in the pruned Conv layers")
    parser.add_argument("--dense-epochs", type=int, default=7)
    parser.add_argument("--prune-epochs", type=int, default=8, help="epochs over which the sparsity grows")
    parser.add_argument("--finish-epochs", type=int, default=5, help="epochs at the full sparsity")
    parser.add_argument("--threads", type=int, default=0, help="0: PyTorch's choice")
    return parser.parse_args()


def main() -> None:
    """Train, prune, export, measure."""
    options = parse_arguments()
    started = time.time()
    torch.manual_seed(0)
    rng = torch.Generator().manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    training, test = read_images(options.data, "train"), read_images(options.data, "t10k")
    net = make_network()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    masks = Masks([layer.weight for layer in list(net)[1:] if isinstance(layer, nn.Conv2d)])

    history = []
    epochs = options.dense_epochs + options.prune_epochs + options.finish_epochs
    with tempfile.TemporaryDirectory() as temporary:
        file, dense_accuracy = Path(temporary, "epoch.onnx"), 0.0
        for epoch in range(epochs):
            step = epoch - options.dense_epochs + 1
            if 0 < step <= options.prune_epochs:
                masks.prune_to(options.sparsity * (1 - (1 - step / options.prune_epochs) ** 3))
            phase, length = (epoch, options.dense_epochs) if step <= 0 else (step - 1, epochs - options.dense_epochs)
            rate = (0.1 if step <= 0 else 0.05) * 0.5 * (1 + np.cos(np.pi * phase / length))
            train_epoch(net, training, optimiser, max(rate, 0.002), masks, rng)
            export(net, file)
            zeros = 1 - sum(int(m.sum()) for m in masks.masks) / sum(m.numel() for m in masks.masks)
            history.append({"epoch": epoch + 1, "sparsity": zeros, "test_accuracy": accuracy(file, *test)})
            print(json.dumps(history[-1]), f"{time.time() - started:.0f} s", flush=True)
            if step == 0:
                dense_accuracy = history[-1]["test_accuracy"]
    export(net, options.out / "fashion_mnist.onnx")
    results = {
        "schema_version": 1,
        "dense_test_accuracy": dense_accuracy,
        "pruned_test_accuracy": accuracy(options.out / "fashion_mnist.onnx", *test),
        "sparsity_of_pruned_layers": history[-1]["sparsity"],
        "history": history,
        "seconds": round(time.time() - started),
        "hardware": {"machine": platform.machine(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "onnxruntime": ort.__version__},
        "commit": commit(),
    }
    (options.out / "training.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
