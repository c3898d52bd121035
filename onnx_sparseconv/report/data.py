"""What a page is made of, as plain values. Nothing here knows of JSON or of HTML."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass


class Outcome(enum.StrEnum):
    """What became of a model."""

    CONVERTED = "converted"
    WOULD_CONVERT = "would convert"
    HALF = "now float16"
    IMAGES = "images added"
    NOTHING = "nothing qualifies"
    ALREADY = "already converted"
    TUNED = "tuned"
    ERROR = "error"


@dataclass(frozen=True)
class LayerTime:
    """Times of one layer at one case, microseconds; None where it was not timed, or cannot run so."""

    dense_us: float | None = None
    sparse_us: float | None = None

    @property
    def speedup(self) -> float | None:
        """How many times faster sparse is; None without both times."""
        if self.dense_us is None or self.sparse_us is None:
            return None
        return self.dense_us / self.sparse_us


@dataclass(frozen=True)
class Layer:
    """One convolution.

    Attributes:
        name, graph: of the node; ``graph`` is empty for the main graph.
        is_sparse: how it runs in the end.
        reason, text: why, as a word and in words.
        plan: the candidate that runs it, and the plans of its GPU images; empty where nothing is known of it.
        weight_shape: ``(K, C / group, D1..Dn)``, None when unknown.
        dtype: of the weight, None when unknown.
        sparsity: share of zeros, 0 to 1, None when unknown.
        nonzeros, num_weights: elements of the weight, None when unknown.
        flops: dense floating-point operations for one image, None when unknown.
        input_shape, output_shape: ``[N, C, D1..Dn]`` with None for unknown sizes, or None.
        dense_bytes, sparse_bytes: of the weight, None when unknown.
        measured_as: name of the layer that was timed in its place; empty where it was itself.
        times: at each case of the report; empty where none were taken.
    """

    name: str
    graph: str = ""
    is_sparse: bool = False
    reason: str = ""
    text: str = ""
    plan: str = ""
    weight_shape: tuple[int, ...] | None = None
    dtype: str | None = None
    sparsity: float | None = None
    nonzeros: int | None = None
    num_weights: int | None = None
    flops: int | None = None
    input_shape: tuple[int | None, ...] | None = None
    output_shape: tuple[int | None, ...] | None = None
    dense_bytes: int | None = None
    sparse_bytes: int | None = None
    measured_as: str = ""
    times: tuple[LayerTime, ...] = ()

    @property
    def label(self) -> str:
        """Its name, and where it lives when that is not the main graph."""
        return f"{self.name} (in {self.graph})" if self.graph else self.name

    def time(self, case: int) -> LayerTime:
        """Its times at a case; without any where it was not timed."""
        return self.times[case] if case < len(self.times) else LayerTime()


@dataclass(frozen=True)
class Case:
    """The whole model at one set of input shapes.

    Attributes:
        label: the shapes in words; empty when they are not known.
        batch: size of the first dimension of all inputs, None where they differ or are not known.
        dense_us, converted_us: measured medians of the whole model, microseconds.
        predicted_us: the converted model as its layers foretold it.
        low, high: in which range the speed-up lay in 8 of 10 rounds.
    """

    label: str = ""
    batch: int | None = None
    dense_us: float | None = None
    converted_us: float | None = None
    predicted_us: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def speedup(self) -> float | None:
        """Of the whole model; None where it was not measured."""
        return (
            self.dense_us / self.converted_us if self.dense_us is not None and self.converted_us is not None else None
        )


@dataclass(frozen=True)
class Peaks:
    """What the machine can do at most.

    Attributes:
        flops_per_s: float32 operations a second, 2 a multiply-add.
        bytes_per_s: from and to memory.
        text: where the figures come from.
    """

    flops_per_s: float
    bytes_per_s: float
    text: str


@dataclass(frozen=True)
class OutputError:
    """How far one output of the converted model is from the original's; None where it was not computed."""

    name: str
    passed: bool
    identical: bool
    max_abs: float | None
    rms: float | None
    max_of_range: float | None
    snr_db: float | None
    argmax_agreement: float | None


@dataclass(frozen=True)
class Report:
    """One model.

    Attributes:
        source: the model that was read.
        output: the file that was written; empty where none was.
        outcome: what became of it.
        error: one line; empty when nothing went wrong.
        layers: every convolution, in the order of the model.
        cases: the shapes that were measured; empty where nothing was.
        gain: whether the model is faster as a whole; None where that was not measured.
        whole_text: the check of the whole model in words.
        timed_alone: whether the times of layers are of each layer alone, and not from within the model.
        num_by_hand: layers whose choice was changed by hand after tuning.
        bytes_before, bytes_after: of the files; None when unknown.
        weights_before, weights_after: bytes of the weights of the layers that became sparse; None when unknown.
        precision: what became float16, in words; empty where that was not asked for.
        notes: what else is worth knowing.
        peaks: of the machine that measured; None where they were not recorded.
        errors: of the outputs; empty where they were not compared.
        setting: where and how it was measured, by name.
        versions: of what made the report, by name.
        created: when, in UTC; empty when unknown.
        scales: names of the depthwise convolutions that conversion made of what scaled channels; none of the layers.
    """

    source: str
    output: str = ""
    outcome: Outcome = Outcome.NOTHING
    error: str = ""
    layers: tuple[Layer, ...] = ()
    cases: tuple[Case, ...] = ()
    gain: bool | None = None
    whole_text: str = ""
    timed_alone: bool = True
    num_by_hand: int = 0
    bytes_before: int | None = None
    bytes_after: int | None = None
    weights_before: int | None = None
    weights_after: int | None = None
    precision: str = ""
    notes: tuple[str, ...] = ()
    peaks: Peaks | None = None
    errors: tuple[OutputError, ...] = ()
    setting: tuple[tuple[str, str], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    created: str = ""
    scales: frozenset[str] = frozenset()

    @property
    def num_sparse(self) -> int:
        """Layers that run sparse in the end."""
        return sum(layer.is_sparse for layer in self.layers)

    @property
    def has_layer_times(self) -> bool:
        """Whether any layer was timed."""
        return any(time.dense_us is not None or time.sparse_us is not None for la in self.layers for time in la.times)

    @property
    def name(self) -> str:
        """The model's file name, without its folders."""
        return self.source.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1] or "model"

    @property
    def speedup(self) -> float | None:
        """Of the whole model: the geometric mean over the cases; None where one was not measured."""
        found = [case.speedup for case in self.cases]
        known = [speedup for speedup in found if speedup is not None and speedup > 0]
        return geometric_mean(known) if known and len(known) == len(found) else None


@dataclass(frozen=True)
class FolderEntry:
    """One of several models.

    Attributes:
        report: what became of it.
        page: path of its own page, relative to the summary's, or ``#`` and a place on that; empty where it has none.
        fresh: False where an earlier run had done it and nothing has changed since.
    """

    report: Report
    page: str = ""
    fresh: bool = True


@dataclass(frozen=True)
class FolderReport:
    """Several models that were converted together.

    Attributes:
        title: the folder, or what stands for it.
        entries: every model.
        interrupted: whether the run was stopped before all were done.
        versions: of what made the report, by name.
        created: when, in UTC; empty when unknown.
    """

    title: str
    entries: tuple[FolderEntry, ...]
    interrupted: bool = False
    versions: tuple[tuple[str, str], ...] = ()
    created: str = ""


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one positive number."""
    return math.exp(sum(map(math.log, values)) / len(values))
