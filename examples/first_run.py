"""Takes one pruned model all the way: inspect, convert, verify, bench. Runs the commands that you would type.

python examples/first_run.py                    # the Fashion-MNIST network beside this file
python examples/first_run.py MODEL.onnx         # a model of yours
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent / "fashion_mnist"


def sparseconv(*arguments: str | Path) -> None:
    """Show a command and run it; stop at the first that fails."""
    words = [str(a) for a in arguments]
    print(f"\n$ sparseconv {shlex.join(words)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "onnx_sparseconv", *words], check=False).returncode
    if status:
        sys.exit(status)


def main() -> None:
    """Run the four commands; the converted model goes to a temporary directory."""
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLE / "fashion_mnist.onnx"
    inputs = [] if len(sys.argv) > 1 else ["--inputs", EXAMPLE / "images.npz"]
    with tempfile.TemporaryDirectory() as directory:
        converted = Path(directory, f"{model.stem}.sparse.onnx")
        sparseconv("inspect", model)
        sparseconv("convert", model, "-o", converted)
        sparseconv("verify", model, converted, *inputs)
        sparseconv("bench", model, converted, *inputs)


if __name__ == "__main__":
    main()
