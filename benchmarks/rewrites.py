r"""Counts the nodes of whole models before and after conversion, and says how far their outputs are apart, as JSON.

    python benchmarks/rewrites.py resnet18.onnx:resnet18.sparse.onnx ... --batch 8 -o build/rewrites-cpu.json
    python benchmarks/rewrites.py --provider cuda resnet18.onnx:resnet18.half.onnx ... -o build/rewrites-cuda.json

Every converted model runs with the library and without it, where it is the dense network; the original runs on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from results_head import results_head

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnx_sparseconv.errors import SparseConvError
from onnx_sparseconv.files import write_text
from onnx_sparseconv.nodes import iterate_nodes
from onnx_sparseconv.runtime.depth import load_structure
from onnx_sparseconv.runtime.environment import read_environment
from onnx_sparseconv.runtime.plain import to_json_text, to_plain
from onnx_sparseconv.runtime.verify import verify
from tests.support.real_models import REAL_MODELS

SCHEMA_VERSION = 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="ORIGINAL:CONVERTED", help="pairs of models")
    parser.add_argument("--provider", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=1, help="of random inputs, where the model leaves it open")
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args()


def count_nodes(path: Path) -> dict[str, int]:
    """Nodes of all graphs of a model by operator, those that only hold constants left out; most frequent first."""
    nodes = iterate_nodes(load_structure(path).graph.node)
    return dict(Counter(node.op_type for node in nodes if node.op_type != "Constant").most_common())


def check(original: Path, converted: Path, provider: str, batch: int, *, use_library: bool) -> dict[str, Any]:
    """What `verify` says of a pair of models, in short."""
    real = REAL_MODELS.get(original.name.partition(".")[0])
    report = verify(
        original,
        converted,
        provider=provider,
        inputs=real.feed() if real else None,
        batch=None if real else batch,
        use_library=use_library,
    )
    return {
        "use_library": use_library,
        "passed": report.passed,
        "input_shapes": to_plain(report.input_shapes),
        "tolerance": report.tolerance.text,
        "outputs": to_plain(report.outputs),
        "kernels": dict(Counter(use.kernel for use in report.kernels)),
        "nodes_elsewhere": len(report.nodes_elsewhere),
    }


def main() -> int:
    """Check what was asked for and write one file, anew after every model; 1 where outputs differ."""
    asked = parse_arguments()
    results: dict[str, Any] = {
        **results_head(SCHEMA_VERSION),
        "environment": read_environment(),
        "models": [],
    }
    failed = False
    for pair in asked.models:
        original, converted = map(Path, pair.split(":"))
        record: dict[str, Any] = {
            "original": original.name,
            "converted": converted.name,
            "provider": asked.provider,
            "nodes_before": count_nodes(original),
            "nodes_after": count_nodes(converted),
        }
        try:
            record["checks"] = [
                check(original, converted, asked.provider, asked.batch, use_library=library)
                for library in (True, False)
            ]
        except SparseConvError as error:
            record["problem"] = str(error)
        passed = "problem" not in record and all(entry["passed"] for entry in record["checks"])
        failed |= not passed
        results["models"].append(record)
        write_text(asked.output, to_json_text(results))
        counts = " to ".join(str(sum(record[key].values())) for key in ("nodes_before", "nodes_after"))
        print(
            f"{converted.name}: {counts} nodes, {'equal' if passed else record.get('problem', 'DIFFERS')}",
            file=sys.stderr,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
