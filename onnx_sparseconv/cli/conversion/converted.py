"""The report of a model that was converted before, from what it says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnx_sparseconv.cli.conversion.work import COMMAND, made_by
from onnx_sparseconv.cli.exit_codes import ExitCode
from onnx_sparseconv.cli.json_output import document
from onnx_sparseconv.errors import ReportError
from onnx_sparseconv.runtime.plain import to_plain


def is_converted(path: Path) -> bool:
    """Whether a model carries sparse convolutions; False for what is no model."""
    import onnx  # noqa: PLC0415
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    from onnx_sparseconv.custom_ops.schema import DOMAIN  # noqa: PLC0415

    try:
        proto = onnx.load_model(str(path), load_external_data=False)
    except (DecodeError, ValueError, OSError):
        return False
    return any(entry.domain == DOMAIN for entry in proto.opset_import)


def left_alone_document(path: Path) -> dict[str, Any]:
    """What `convert` reports of a converted model that it was asked nothing new of.

    What stayed dense in it was decided then, perhaps by measurement; its sparsity shall not overrule that now.

    Raises:
        ModelError: it cannot be read.
    """
    from onnx_sparseconv.converter import inspect  # noqa: PLC0415

    model: dict[str, Any] = to_plain(inspect(path))
    content = {
        "source": str(path),
        "output": None,
        "model": model,
        "converted": False,
        "already_converted": True,
        "bytes_before": model["size_bytes"],
        "bytes_after": None,
        "notes": model["notes"],
        "precision": None,
        "decisions": None,
        **made_by(),
        "exit_code": int(ExitCode.NOTHING_QUALIFIED),
    }
    for layer in model["layers"]:
        layer["verdict"] |= {"rewrite": False}
    return document(COMMAND, content)


def converted_document(path: Path) -> dict[str, Any]:
    """What `convert` would have reported of a converted model, as far as the model tells.

    Its layers have the reasons that were recorded when it was converted.

    Raises:
        ModelError: it cannot be read.
        ReportError: it was not converted.
    """
    from onnx_sparseconv.converter import inspect  # noqa: PLC0415
    from onnx_sparseconv.converter.metadata import decisions_of  # noqa: PLC0415
    from onnx_sparseconv.converter.model_io import load  # noqa: PLC0415

    report = inspect(path)
    model: dict[str, Any] = to_plain(report)
    sparse = [layer for layer in model["layers"] if layer["verdict"]["reason"] == "already-sparse"]
    if not sparse and not report.converted_by:
        raise ReportError(
            f"{path}: was not converted: 'sparseconv convert --report' reports of a model while converting"
        )
    recorded = {(one.get("graph"), one.get("name")): one for one in decisions_of(load(path).proto)}
    for layer in model["layers"]:
        layer["verdict"] = _verdict(layer, recorded.get((layer["graph"], layer["name"])))
    content = {
        "source": str(path),
        "output": str(path),
        "model": model,
        "converted": True,
        "already_converted": False,
        "bytes_before": None,
        "bytes_after": model["size_bytes"],
        "conv_bytes_before": sum(layer["dense_bytes"] for layer in sparse),
        "conv_bytes_after": sum(layer["sparse_bytes"] or 0 for layer in sparse),
        "notes": model["notes"],
        "precision": None,
        "decisions": None,
        "versions": {"onnx-sparseconv": report.converted_by},
    }
    return document(COMMAND, content)


def _verdict(layer: dict[str, Any], recorded: dict[str, Any] | None) -> dict[str, Any]:
    """How a layer runs, with the reason that was recorded where that fits."""
    verdict: dict[str, Any] = layer["verdict"]
    is_sparse = verdict["reason"] == "already-sparse"
    if recorded is None or bool(recorded.get("rewritten")) != is_sparse:
        return {**verdict, "rewrite": is_sparse}
    return {"rewrite": is_sparse, "reason": str(recorded.get("reason", "")), "text": str(recorded.get("text", ""))}
