"""How far two arrays are from each other, and how far two correct computations may be.

The default tolerance is derived, not chosen by feel; `derive_tolerance` holds the formula and docs/command-line.md
explains it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.errors import UsageError

Array = NDArray[Any]

# Unit roundoff: the largest relative error of rounding a number to the type.
UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "int8": 2.0**-8,
}
SAFETY = 8.0
FORMULA = "8 * sqrt(depth) * (u(storage) + sqrt(dot length) * u(accumulation))"


@dataclass(frozen=True)
class NumericalDepth:
    """What decides how far rounding errors of a model can grow.

    Attributes:
        depth: Conv, Gemm, MatMul and their kin on the longest path through the model.
        dot_length: terms of the longest dot product among them.
        storage: coarsest type in which values between layers are kept; ``int8`` for a model with quantisation,
            ``tf32`` for floats that layers may round to TF32 when they read them.
        accumulation: type in which products are summed.
    """

    depth: int
    dot_length: int
    storage: str
    accumulation: str = "float32"


@dataclass(frozen=True)
class Tolerance:
    """An element passes when ``|converted - original| <= rtol * |original| + atol_of_scale * scale`` (or ``+ atol``).

    ``scale`` is the largest finite magnitude of the original's output.

    Attributes:
        rtol: relative to the element.
        atol_of_scale: relative to the output's scale; not used where ``atol`` is given.
        atol: absolute, None unless it was given by the user.
        derived_from: the figures behind the defaults.
        text: the rule in words.
    """

    rtol: float
    atol_of_scale: float
    atol: float | None
    derived_from: NumericalDepth
    text: str


@dataclass(frozen=True)
class ErrorMetrics:
    """Errors over the elements that are finite in both outputs; all None where there are none.

    Attributes:
        max_abs: largest ``|converted - original|``.
        mean_abs: its mean.
        rms: root of the mean square.
        max_relative: largest ``|error| / |original|`` over elements that are not zero in the original.
        max_of_range: largest error over the range (max - min) of the original's output.
        cosine_similarity: of the two flattened outputs.
        snr_db: 10 log10(power of the original / power of the error); None without any error.
    """

    max_abs: float | None = None
    mean_abs: float | None = None
    rms: float | None = None
    max_relative: float | None = None
    max_of_range: float | None = None
    cosine_similarity: float | None = None
    snr_db: float | None = None


@dataclass(frozen=True)
class OutputComparison:
    """One output of two models.

    Attributes:
        name: the output.
        dtype, shape: of the original's output.
        converted_dtype, converted_shape: of the converted model's.
        passed: whether it lies within the tolerance.
        reason: why it does not; empty when it does.
        atol: absolute part of the tolerance as applied; None for outputs that have to be equal.
        scale: largest finite magnitude in the original's output.
        errors: how far the two are from each other.
        identical: every element is the same.
        num_elements: elements of the output.
        num_outside: elements outside the tolerance, NaN and Inf mismatches included.
        num_nonfinite_mismatches: elements that are NaN or Inf in one and something else in the other.
        num_nonfinite: NaN and Inf in the original.
        argmax_agreement: share of rows whose largest element is at the same place; for what looks like class scores.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    converted_dtype: str
    converted_shape: tuple[int, ...]
    passed: bool
    reason: str
    atol: float | None = None
    scale: float | None = None
    errors: ErrorMetrics = ErrorMetrics()
    identical: bool = False
    num_elements: int = 0
    num_outside: int = 0
    num_nonfinite_mismatches: int = 0
    num_nonfinite: int = 0
    argmax_agreement: float | None = None


def derive_tolerance(depth: NumericalDepth, rtol: float | None = None, atol: float | None = None) -> Tolerance:
    """The tolerance for a model: ``SAFETY * sqrt(depth) * (u_storage + sqrt(dot_length) * u_accumulation)``.

    Rounding errors of a sum in another order behave like a random walk, so a dot product of length n is off by about
    sqrt(n) roundings; each layer then rounds once to the storage type; the errors of the layers are independent, so
    they add up as the square root of their number.

    Args:
        depth: figures of the model.
        rtol: replaces the relative part.
        atol: replaces the absolute part.

    Raises:
        UsageError: one of these is negative, or no number.
    """
    for name, value in ("rtol", rtol), ("atol", atol):
        if value is not None and not value >= 0:  # NaN is neither
            raise UsageError(f"{name} must be at least 0, got {value}")
    storage, accumulation = UNIT_ROUNDOFF[depth.storage], UNIT_ROUNDOFF[depth.accumulation]
    derived = SAFETY * math.sqrt(max(depth.depth, 1)) * (storage + math.sqrt(max(depth.dot_length, 1)) * accumulation)
    relative = derived if rtol is None else rtol
    types = f"{depth.storage} storage, {depth.accumulation} accumulation"
    figures = f"depth {depth.depth}, longest dot product {depth.dot_length}, {types}"
    rtol_text = f"{relative:.2g} x |original|"
    atol_text = f"{derived:.2g} x largest |original| of the output" if atol is None else f"{atol:.2g}"
    source = f"{derived:.2g} = {FORMULA}: {figures}" if rtol is None or atol is None else "as given"
    text = f"error <= {rtol_text} + {atol_text} ({source})"
    return Tolerance(relative, derived, atol, depth, text)


def compare_outputs(name: str, original: Array, converted: Array, tolerance: Tolerance) -> OutputComparison:
    """Compare one output element by element. Integers, booleans and strings have to be equal."""
    original, converted = np.asarray(original), np.asarray(converted)
    names = (name, str(original.dtype), original.shape, str(converted.dtype), converted.shape)
    if original.shape != converted.shape:
        return OutputComparison(*names, passed=False, reason="another shape", num_elements=original.size)
    if original.dtype != converted.dtype:
        return OutputComparison(*names, passed=False, reason="another type", num_elements=original.size)
    if original.dtype.kind != "f":
        return _compare_exactly(names, original, converted)
    return _compare_floats(names, original.astype(np.float64), converted.astype(np.float64), tolerance)


_Names = tuple[str, str, tuple[int, ...], str, tuple[int, ...]]


def _compare_exactly(names: _Names, original: Array, converted: Array) -> OutputComparison:
    different = int(np.count_nonzero(original != converted))
    max_error = None
    if original.dtype.kind in "iu" and original.size:
        max_error = float(np.max(np.abs(original.astype(np.float64) - converted.astype(np.float64))))
    return OutputComparison(
        *names,
        passed=different == 0,
        reason=f"{different} of {original.size} elements differ" if different else "",
        errors=ErrorMetrics(max_abs=max_error),
        identical=different == 0,
        num_elements=original.size,
        num_outside=different,
    )


def _compare_floats(names: _Names, original: Array, converted: Array, tolerance: Tolerance) -> OutputComparison:
    finite = np.isfinite(original) & np.isfinite(converted)
    both_special = (original == converted) | (np.isnan(original) & np.isnan(converted))
    mismatches = int(np.count_nonzero(~finite & ~both_special))
    a, b = original[finite], converted[finite]
    error = np.abs(b - a)
    known = np.abs(original[np.isfinite(original)])
    scale = float(known.max()) if known.size else 0.0
    atol = tolerance.atol_of_scale * scale if tolerance.atol is None else tolerance.atol
    outside = int(np.count_nonzero(error > tolerance.rtol * np.abs(a) + atol)) + mismatches
    return OutputComparison(
        *names,
        passed=outside == 0,
        reason=_reason(outside, mismatches, original.size),
        atol=atol,
        scale=scale,
        errors=error_metrics(a, b),
        identical=mismatches == 0 and not error.any(),
        num_elements=original.size,
        num_outside=outside,
        num_nonfinite_mismatches=mismatches,
        num_nonfinite=int(np.count_nonzero(~np.isfinite(original))),
        argmax_agreement=argmax_agreement(original, converted),
    )


def _reason(outside: int, mismatches: int, size: int) -> str:
    if not outside:
        return ""
    text = f"{outside} of {size} elements outside the tolerance"
    return f"{text}, {mismatches} of them NaN or Inf in one model only" if mismatches else text


def error_metrics(original: Array, converted: Array) -> ErrorMetrics:
    """Metrics of two float64 arrays ``[n]`` without NaN and Inf."""
    if not original.size:
        return ErrorMetrics()
    error = np.abs(converted - original)
    nonzero = original != 0
    spread = float(original.max() - original.min())
    return ErrorMetrics(
        max_abs=float(error.max()),
        mean_abs=float(error.mean()),
        rms=math.sqrt(float(np.mean(error**2))),
        max_relative=float((error[nonzero] / np.abs(original[nonzero])).max()) if nonzero.any() else None,
        max_of_range=float(error.max()) / spread if spread > 0 else None,
        cosine_similarity=cosine_similarity(original, converted),
        snr_db=snr_db(original, error),
    )


def cosine_similarity(a: Array, b: Array) -> float | None:
    """Cosine of the angle between two arrays taken as vectors; None when one is all zero."""
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return min(1.0, max(-1.0, float(np.dot(a.ravel(), b.ravel())) / norms)) if norms > 0 else None


def snr_db(signal: Array, error: Array) -> float | None:
    """Signal-to-noise ratio in decibels; None without noise or without signal."""
    signal_power, error_power = float(np.sum(signal**2)), float(np.sum(error**2))
    return 10 * math.log10(signal_power / error_power) if signal_power > 0 and error_power > 0 else None


def argmax_agreement(original: Array, converted: Array) -> float | None:
    """Share of rows with the largest element at the same place.

    None for anything that does not look like class scores, ``[rows, classes]`` or ``[rows, classes, 1, 1..]``, or is
    not finite.
    """
    if original.ndim < 2 or original.shape[1] < 2 or original.size != original.shape[0] * original.shape[1]:
        return None
    if not original.size or not np.isfinite(original).all() or not np.isfinite(converted).all():
        return None
    rows = original.shape[0]
    return float(np.mean(original.reshape(rows, -1).argmax(1) == converted.reshape(rows, -1).argmax(1)))
