"""Make a pruned ONNX CNN really faster: sparse convolution for ONNX Runtime.

::

    import onnx_sparseconv as sc

    print(sc.inspect("model.onnx").sparsity)
    model, report = sc.convert("model.onnx", "fast.onnx")
    session = sc.make_session("fast.onnx")

Importing the package is cheap: onnx and onnxruntime are imported by the functions that need them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onnx_sparseconv.errors import SparseConvError
from onnx_sparseconv.version import __version__

if TYPE_CHECKING:
    from onnx_sparseconv.converter import (
        ConvertOptions,
        convert,
        inspect,
        prune,
        read_decisions,
        restore,
        write_decisions,
    )
    from onnx_sparseconv.custom_ops.library import library_path, register
    from onnx_sparseconv.runtime.session import make_session
    from onnx_sparseconv.runtime.verify import verify
    from onnx_sparseconv.tuner import Case, TuneOptions, tune

__all__ = [
    "Case",
    "ConvertOptions",
    "SparseConvError",
    "TuneOptions",
    "__version__",
    "convert",
    "inspect",
    "library_path",
    "make_session",
    "prune",
    "read_decisions",
    "register",
    "restore",
    "tune",
    "verify",
    "write_decisions",
]

_CONVERTER = ("ConvertOptions", "convert", "inspect", "prune", "read_decisions", "restore", "write_decisions")
_HOME = {
    **dict.fromkeys(_CONVERTER, "onnx_sparseconv.converter"),
    **dict.fromkeys(("library_path", "register"), "onnx_sparseconv.custom_ops.library"),
    "make_session": "onnx_sparseconv.runtime.session",
    **dict.fromkeys(("Case", "TuneOptions", "tune"), "onnx_sparseconv.tuner"),
    "verify": "onnx_sparseconv.runtime.verify",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import a public name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted(__all__)
