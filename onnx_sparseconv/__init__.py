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
    from onnx_sparseconv.converter import ConvertOptions, convert, inspect, prune, restore
    from onnx_sparseconv.custom_ops.library import library_path, register
    from onnx_sparseconv.runtime.session import make_session
    from onnx_sparseconv.runtime.verify import verify

__all__ = [
    "ConvertOptions",
    "SparseConvError",
    "__version__",
    "convert",
    "inspect",
    "library_path",
    "make_session",
    "prune",
    "register",
    "restore",
    "verify",
]

_HOME = {
    **dict.fromkeys(("ConvertOptions", "convert", "inspect", "prune", "restore"), "onnx_sparseconv.converter"),
    **dict.fromkeys(("library_path", "register"), "onnx_sparseconv.custom_ops.library"),
    "make_session": "onnx_sparseconv.runtime.session",
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
