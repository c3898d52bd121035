"""The exceptions of the package, one root, so that a caller can catch them all at once.

A layer that is left dense is not an error: it is a decision with a reason.
"""

from __future__ import annotations


class SparseConvError(Exception):
    """Root of every error that a user can mend. The message says what, where and what to do."""


class ModelError(SparseConvError):
    """The model file cannot be read, is not valid ONNX, or cannot be written."""


class FormatError(SparseConvError):
    """Unified-CSR arrays or node attributes contradict each other."""


class DecisionsError(SparseConvError):
    """A decisions file cannot be read, contradicts itself, or is for another model."""


class ReportError(SparseConvError):
    """A file is no report that a page can be made of."""


class CompileError(SparseConvError):
    """GPU code could not be compiled, or there is no compiler.

    Attributes:
        log: all that the compiler said; empty when it did not get to run.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message, log)  # both, so that a worker process can hand the error over
        self.log = log

    def __str__(self) -> str:
        """The message alone."""
        return str(self.args[0])


class NativeLibraryError(SparseConvError):
    """The custom-op library, or the runtime that should load it, is missing or does not work."""


class ProviderError(SparseConvError):
    """The execution provider that was asked for is not the one that would run."""


class VerificationError(SparseConvError):
    """Two models could not be compared (a difference in outputs is a result, not an error)."""


class UsageError(SparseConvError):
    """The arguments of a call contradict each other."""
