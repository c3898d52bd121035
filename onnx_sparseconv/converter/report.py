"""What inspect, convert, prune and restore found and did, as data. Printing is the command line's business."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx_sparseconv.converter.decisions import Decisions


class Reason(enum.StrEnum):
    """Why a Conv is rewritten or left dense; the machine-readable half of a `Verdict`."""

    REWRITE = "rewrite"
    FORCED = "forced"
    DECIDED_SPARSE = "decided-sparse"
    DECIDED_DENSE = "decided-dense"
    ALREADY_SPARSE = "already-sparse"
    TOO_DENSE = "too-dense"
    DEPTHWISE = "depthwise"
    BESIDE_DEPTHWISE = "beside-depthwise"
    LITTLE_WORK = "little-work"
    NO_PREDICTED_GAIN = "no-predicted-gain"
    TOO_SMALL = "too-small"
    RUNTIME_WEIGHT = "runtime-weight"
    OVERRIDABLE_WEIGHT = "overridable-weight"
    QUANTISED = "quantised"
    NOT_FINITE = "not-finite"
    UNSUPPORTED_TYPE = "unsupported-type"
    UNSUPPORTED_FORM = "unsupported-form"
    UNSUPPORTED_OPSET = "unsupported-opset"
    INVALID = "invalid"


# Verdicts that `--force` cannot change: there is nothing to rewrite, or no way to express it.
NOT_FORCIBLE = frozenset(
    {
        Reason.ALREADY_SPARSE,
        Reason.RUNTIME_WEIGHT,
        Reason.UNSUPPORTED_TYPE,
        Reason.UNSUPPORTED_FORM,
        Reason.UNSUPPORTED_OPSET,
        Reason.INVALID,
    }
)


@dataclass(frozen=True)
class Verdict:
    """The decision on one Conv.

    Attributes:
        rewrite: whether it becomes SparseConv.
        reason: machine-readable cause.
        text: the cause in words, with the figures that led to it.
    """

    rewrite: bool
    reason: Reason
    text: str


@dataclass(frozen=True)
class RowSparsity:
    """Share of zeros of single output channels, 0 to 1."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True)
class ImageReport:
    """One layer on one GPU architecture: its kernel image, or why it has none and the general CSR kernel runs.

    Attributes:
        architecture: such as ``sm_90``; empty for a container that cannot be read.
        size_bytes: of the image.
        compiler: what made it.
        min_driver: the oldest driver that loads it, such as ``CUDA 12.0``.
        plan: what the code was made for, in one line.
        refusal: why there is no image; empty when there is one.
        time_us: what it took to make it, or to find it in the cache; None when it was made before.
        cached: whether it came out of the cache.
    """

    architecture: str
    size_bytes: int
    compiler: str
    min_driver: str
    plan: str
    refusal: str
    time_us: float | None = None
    cached: bool = False


@dataclass(frozen=True)
class LayerReport:
    """One Conv (or, in a converted model, SparseConv) node.

    Attributes:
        name: the node's name, or one made from its output where it has none.
        op_type: ``Conv``, or one of our ops.
        graph: where the node lives: empty for the main graph, else the path of subgraphs or the function.
        weight_name: tensor that feeds the weight; empty when it is stored in the node.
        weight_source: how it is fed: ``initializer``, ``Constant``, or the ops between, such as ``Cast(initializer)``.
        weight_shape: ``(K, C / group, D1..Dn)``, None when unknown.
        dtype: numpy name of the weight's type as the Conv sees it, None when unknown.
        group, kernel_shape, strides, dilations: as in ONNX Conv.
        num_weights: elements of the weight, 0 when unknown.
        nonzeros: elements that are not +0, None when the weight is not known at conversion.
        sparsity: share of zeros, 0 to 1, or None.
        row_sparsity: spread over output channels, or None.
        zero_out_channels, zero_in_channels: channels whose weights are all zero (structured sparsity).
        flops: dense floating-point operations for one image (2 a multiply-add), None where shapes do not allow it.
        dense_bytes: bytes of the dense weight.
        sparse_bytes: bytes of the unified-CSR arrays, None when not encoded.
        padding: stored entries over non-zeros, None when not encoded.
        verdict: the decision.
        images: GPU kernel images of a sparse node, or of the node that the layer became; one for each architecture
            that was asked for.
        input_shape, output_shape: ``[N, C, D1..Dn]`` with None for unknown sizes, None where not even the rank is
            known.
    """

    name: str
    op_type: str
    graph: str
    weight_name: str
    weight_source: str
    weight_shape: tuple[int, ...] | None
    dtype: str | None
    group: int
    kernel_shape: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    num_weights: int
    nonzeros: int | None
    sparsity: float | None
    row_sparsity: RowSparsity | None
    zero_out_channels: int
    zero_in_channels: int
    flops: int | None
    dense_bytes: int
    sparse_bytes: int | None
    padding: float | None
    verdict: Verdict
    images: tuple[ImageReport, ...] = ()
    input_shape: tuple[int | None, ...] | None = None
    output_shape: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class ModelReport:
    """What `inspect` found in one model.

    Attributes:
        path: the file, None for a model in memory.
        opset: default-domain opset version.
        ir_version: ONNX IR version.
        producer: name and version of the tool that wrote the model.
        size_bytes: bytes of the file(s), external data included.
        converted_by: version of onnx-sparseconv that converted it, None when it is not converted.
        layers: every Conv and SparseConv.
        notes: remarks on the whole model.
    """

    path: Path | None
    opset: int
    ir_version: int
    producer: str
    size_bytes: int
    converted_by: str | None
    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...]

    @property
    def sparsity(self) -> float | None:
        """Share of zeros over all Conv weights that are known, or None without any."""
        known = [(layer.num_weights, layer.nonzeros) for layer in self.layers if layer.nonzeros is not None]
        total = sum(n for n, _ in known)
        return 1 - sum(nnz for _, nnz in known) / total if total else None

    @property
    def num_rewritten(self) -> int:
        """Layers whose verdict is to rewrite."""
        return sum(layer.verdict.rewrite for layer in self.layers)


@dataclass(frozen=True)
class NodeNote:
    """A remark on one node: its name (or its output's), the graph it lives in, and what there is to say."""

    node: str
    graph: str
    text: str


@dataclass(frozen=True)
class PassReport:
    """What one graph pass did.

    Attributes:
        name: class of the pass.
        changed: how often it took something in; an activation that is spelled in several nodes counts once.
        done: by the convolution that took something in: what that was.
        refused: by the node that stays, where one would expect that it goes: why.
    """

    name: str
    changed: int
    done: tuple[NodeNote, ...]
    refused: tuple[NodeNote, ...]


@dataclass(frozen=True)
class PrecisionReport:
    """What became of a model that was to become float16.

    Attributes:
        precision: ``fp16``.
        half_io: whether its float inputs and outputs became float16, too.
        changed: whether anything became float16.
        half_nodes: nodes that compute in float16 now and did not before.
        kept: nodes that stay float, and why.
        casts: Cast nodes that were added.
        notes: weights that vanished, and nodes of other floating-point types.
    """

    precision: str
    half_io: bool
    changed: bool
    half_nodes: int
    kept: tuple[NodeNote, ...]
    casts: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did.

    Attributes:
        source: the model that was read, None for one in memory.
        output: the file that was written; None on a dry run, when nothing qualified, or when no file was asked for.
        model: the source's report, verdicts as applied.
        converted: whether at least one Conv was rewritten.
        already_converted: the source carried SparseConv nodes before.
        bytes_before, bytes_after: file sizes, external data included; ``bytes_after`` is the would-be size on a dry
            run.
        conv_bytes_before: dense bytes of the rewritten weights.
        conv_bytes_after: unified-CSR bytes of the rewritten weights.
        nodes_before, nodes_after: nodes in all graphs of the model, functions left out.
        notes: what else was changed or is worth knowing (opset raised, weights kept because others use them, ...).
        passes: what each graph pass did around the rewritten nodes, in the order in which they ran.
        targets: GPU architectures that images were asked for, such as ``sm_90``.
        imaged_bytes_before: dense bytes of the weights of layers that carry GPU images.
        imaged_bytes_after: what these layers take now: unified CSR and images.
        precision: what became float16, None where that was not asked for.
        decisions: what measurement had decided; None where the sparsity of the layers did.
    """

    source: Path | None
    output: Path | None
    model: ModelReport
    converted: bool
    already_converted: bool
    bytes_before: int
    bytes_after: int | None
    conv_bytes_before: int
    conv_bytes_after: int
    nodes_before: int
    nodes_after: int
    notes: tuple[str, ...]
    passes: tuple[PassReport, ...] = ()
    targets: tuple[str, ...] = ()
    imaged_bytes_before: int = 0
    imaged_bytes_after: int = 0
    precision: PrecisionReport | None = None
    decisions: Decisions | None = None

    @property
    def changed(self) -> bool:
        """Whether the result differs from the source: layers were rewritten, made float16, or given images."""
        return self.converted or self.is_half or self.imaged_bytes_after > 0

    @property
    def is_half(self) -> bool:
        """Whether something became float16."""
        return self.precision is not None and self.precision.changed


@dataclass(frozen=True)
class PrunedLayer:
    """One Conv weight before and after pruning; ``skipped`` says why it was left alone (empty: it was pruned)."""

    name: str
    weight_name: str
    weight_shape: tuple[int, ...] | None
    sparsity_before: float | None
    sparsity_after: float | None
    skipped: str


@dataclass(frozen=True)
class PruneReport:
    """What `prune` did; sparsities are over the Conv weights that were pruned."""

    source: Path | None
    output: Path | None
    scope: str
    target: float
    sparsity_before: float
    sparsity_after: float
    layers: tuple[PrunedLayer, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RestoreReport:
    """What `restore` did; ``layers`` are the names of the nodes that are Conv again."""

    source: Path | None
    output: Path | None
    layers: tuple[str, ...]
    notes: tuple[str, ...]
