"""Layers of a model in words and tables, shared by ``inspect`` and ``convert``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnx_sparseconv.cli.console import (
    Column,
    Table,
    format_bytes,
    format_percent,
    format_shape,
    format_time,
    shorten,
    shown_name,
)
from onnx_sparseconv.text import count

if TYPE_CHECKING:
    from onnx_sparseconv.converter.report import LayerReport, NodeNote

_MAX_NAMES = 4
_MAX_OPS = 6


def layer_label(layer: LayerReport) -> str:
    """A layer's name, and where it lives when that is not the main graph."""
    return f"{layer.name} (in {layer.graph})" if layer.graph else layer.name


def verdict_word(layer: LayerReport) -> str:
    """The verdict in one or two words."""
    reason = layer.verdict.reason.value
    if reason == "already-sparse":
        return "already sparse"
    if layer.verdict.rewrite:
        suffixes = {"forced": " (forced)", "decided-sparse": " (decided)"}
        return f"sparse{suffixes.get(reason, '')}"
    return f"dense: {reason.replace('-', ' ')}"


def inspect_table(layers: Sequence[LayerReport], *, wide: bool) -> Table:
    """One row a layer. A narrow one leaves the reason in words to `reason_lines`."""
    columns = [
        Column("layer", fold=True),
        Column("weight", fold=not wide),
        Column("zeros", right=True),
        Column("by channel", right=True),
        Column("0-ch", right=True),
        Column("MFLOP", right=True),
        Column("verdict", fold=not wide),
    ]
    rows = [_inspect_row(layer) for layer in layers]
    if wide:
        columns.append(Column("why", fold=True))
        rows = [(*row, layer.verdict.text) for row, layer in zip(rows, layers, strict=True)]
    return Table(tuple(columns), tuple(rows))


def _inspect_row(layer: LayerReport) -> tuple[str, ...]:
    return (
        shown_name(layer_label(layer)),
        format_shape(layer.weight_shape),
        format_percent(layer.sparsity),
        _spread(layer),
        _zero_channels(layer),
        "?" if layer.flops is None else _mflop(layer.flops),
        verdict_word(layer),
    )


def converted_table(layers: Sequence[LayerReport]) -> Table:
    """The layers that became sparse, with the bytes of their weights."""
    columns = (
        Column("layer", fold=True),
        Column("weight", fold=True),
        Column("zeros", right=True),
        Column("dense", right=True),
        Column("stored", right=True),
        Column("padding", right=True),
    )
    rows = tuple(
        (
            shown_name(layer_label(layer)),
            format_shape(layer.weight_shape),
            format_percent(layer.sparsity),
            format_bytes(layer.dense_bytes),
            format_bytes(layer.sparse_bytes),
            "?" if layer.padding is None else f"{layer.padding:.2f}x",
        )
        for layer in layers
        if layer.verdict.rewrite
    )
    return Table(columns, rows)


def images_table(layers: Sequence[LayerReport], *, made_now: bool = True) -> Table:
    """GPU images, one a row: with the time that each took, or with what made it and the driver that it needs."""
    last = ("compiled in",) if made_now else ("compiler", "driver")
    columns = (
        Column("layer", fold=True),
        Column("target"),
        Column("image", right=True),
        *(Column(title, right=made_now) for title in last),
        Column("plan", fold=True),
    )
    rows = []
    for layer in layers:
        for image in layer.images:
            if image.refusal:
                continue
            took = ("cached" if image.cached else format_time(image.time_us),)
            middle = took if made_now else (image.compiler, f"from {image.min_driver}")
            name = shown_name(layer_label(layer))
            rows.append((name, image.architecture, format_bytes(image.size_bytes), *middle, image.plan))
    return Table(columns, tuple(rows))


def refused_image_lines(layers: Sequence[LayerReport]) -> list[str]:
    """Why layers have no GPU image, one line a reason."""
    reasons: dict[str, list[str]] = {}
    for layer in layers:
        for image in layer.images:
            if image.refusal:
                where = f"{shorten(layer_label(layer))} ({image.architecture})" if image.architecture else layer.name
                reasons.setdefault(image.refusal, []).append(where)
    return [
        f"  no image, the library's own kernels will run: {', '.join(names)}: {reason}"
        for reason, names in reasons.items()
    ]


def reason_lines(layers: Sequence[LayerReport]) -> list[str]:
    """Why layers stay dense, grouped by reason, the largest group first, each with the names of its first layers."""
    groups: dict[str, list[LayerReport]] = {}
    for layer in layers:
        if not layer.verdict.rewrite:
            groups.setdefault(layer.verdict.reason.value, []).append(layer)
    lines = []
    for reason, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        texts = list(dict.fromkeys(layer.verdict.text for layer in members))
        names = [shorten(layer_label(layer)) for layer in members]
        shown = names[:_MAX_NAMES]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        example = texts[0] if len(texts) == 1 else f"for example, {texts[0]}"
        lines.append(f"  {reason.replace('-', ' ')}, {count(len(members), 'layer')}: {example}")
        lines.append(f"      {', '.join(shown)}{more}")
    return lines


def kept_float_lines(kept: Sequence[NodeNote]) -> list[str]:
    """Which operators stay float, grouped by the reason, with the name of the first node of each."""
    groups: dict[str, dict[str, list[str]]] = {}
    for note in kept:
        op, why = note.text.split(": ", 1)
        groups.setdefault(why, {}).setdefault(op, []).append(note.node)
    lines = []
    for why, ops in sorted(groups.items(), key=lambda item: -sum(map(len, item[1].values()))):
        nodes = [f"{len(names)} {op} ({_first_of(names)})" for op, names in ops.items()]
        shown = nodes[:_MAX_OPS]
        more = f" and {len(nodes) - len(shown)} other operators" if len(nodes) > len(shown) else ""
        lines.append(f"  {', '.join(shown)}{more}: {why}")
    return lines


def _first_of(names: Sequence[str]) -> str:
    return shorten(names[0]) + (", ..." if len(names) > 1 else "")


def _spread(layer: LayerReport) -> str:
    """Lowest and highest share of zeros of a single output channel."""
    if layer.row_sparsity is None:
        return "?"
    low, high = 100 * layer.row_sparsity.min, 100 * layer.row_sparsity.max
    return f"{low:.0f}-{high:.0f}%"


def _zero_channels(layer: LayerReport) -> str:
    """All-zero channels: output/input."""
    if layer.weight_shape is None:
        return "?"
    if not layer.zero_out_channels and not layer.zero_in_channels:
        return "-"
    return f"{layer.zero_out_channels}/{layer.zero_in_channels}"


def _mflop(flops: int) -> str:
    mflop = flops / 1e6
    return f"{mflop:.2f}" if mflop < 10 else f"{mflop:.0f}"
