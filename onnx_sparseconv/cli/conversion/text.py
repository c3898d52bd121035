"""What `convert` prints of one model, and of several."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnx_sparseconv.cli.batch import Outcome
from onnx_sparseconv.cli.console import (
    Column,
    Table,
    format_bytes,
    format_change,
    format_percent,
    say,
    say_command,
    say_table,
)
from onnx_sparseconv.cli.conversion.job import Job
from onnx_sparseconv.cli.layers import (
    converted_table,
    images_table,
    kept_float_lines,
    reason_lines,
    refused_image_lines,
)
from onnx_sparseconv.cli.tuning import say_whole
from onnx_sparseconv.text import count

if TYPE_CHECKING:
    from onnx_sparseconv.converter.report import ConversionReport, PrecisionReport


def print_conversion(job: Job, report: ConversionReport) -> None:
    """Print what was done with one model, why, and what comes next."""
    layers = report.model.layers
    rewritten = [layer for layer in layers if layer.verdict.rewrite]
    if not report.changed:
        _print_nothing(job, report)
        return
    verb = "would become" if job.dry_run else "became"
    if report.converted:
        what = "a sparse convolution" if len(rewritten) == 1 else "sparse convolutions"
        say(f"{job.model}: {len(rewritten)} of {count(len(layers), 'Conv layer')} {verb} {what}")
        say()
        say_table(converted_table(layers))
    elif report.is_half:
        say(f"{job.model}: {'would become' if job.dry_run else 'became'} float16; {_why_no_layer(report)}")
    else:
        say(f"{job.model}: already converted; GPU images were added")
    if report.converted and (lines := reason_lines(layers)):
        say()
        say("Left dense")
        for line in lines:
            say(line)
    say()
    if report.precision is not None:
        _print_precision(report.precision)
    if report.targets and not job.dry_run:
        _print_images(report)
    if report.converted:
        change = format_change(report.conv_bytes_before, report.conv_bytes_after)
        say(f"Conv weights  {change}, of the rewritten layers")
    if report.imaged_bytes_after:
        change = format_change(report.imaged_bytes_before, report.imaged_bytes_after)
        say(f"with images   {change}, of the layers that carry GPU images")
    say(f"file          {format_change(report.bytes_before, report.bytes_after)}")
    if job.tune is not None and report.decisions is not None:
        say_whole(report.decisions)
    for note in report.notes:
        say(f"note: {note}")
    _print_next_steps(job, report)


def _why_no_layer(report: ConversionReport) -> str:
    if report.already_converted:
        return "its sparse layers were converted before"
    return "no Conv layer qualifies to become sparse" if report.model.layers else "it has no Conv layer"


def _print_precision(report: PrecisionReport) -> None:
    if report.changed:
        ends = ", inputs and outputs, too" if report.half_io else ""
        casts = f"{count(report.casts, 'Cast')} added"
        say(f"precision     float16: {count(report.half_nodes, 'node')}{ends}; {casts}")
    else:
        say("precision     nothing became float16: the model has no Conv, Gemm or MatMul in float that could")
    if report.kept:
        say("Left float")
        for line in kept_float_lines(report.kept):
            say(line, hang=2)
    for note in report.notes:
        say(f"note: {note}")
    say()


def _print_images(report: ConversionReport) -> None:
    layers = report.model.layers
    say("GPU images")
    if (table := images_table(layers)).rows:
        say_table(table)
    for line in refused_image_lines(layers):
        say(line)
    say()


def _print_nothing(job: Job, report: ConversionReport) -> None:
    if report.already_converted:
        say(f"{job.model}: already converted, and nothing new to rewrite; nothing was written")
    else:
        say(f"{job.model}: no Conv layer qualifies; nothing was written")
    for line in reason_lines(report.model.layers):
        say(line)
    if report.precision is not None:
        _print_precision(report.precision)
    if job.tune is not None and report.decisions is not None:
        say_whole(report.decisions)
    for note in report.notes:
        say(f"note: {note}")
    if report.decisions is None and report.model.layers and not report.already_converted and not job.force:
        say(_advice(job, report))


# Fewer zeros than this are there by chance.
_NO_ZEROS = 0.01


def _advice(job: Job, report: ConversionReport) -> str:
    """What somebody can do where nothing qualifies."""
    sparsity = report.model.sparsity
    if sparsity is not None and sparsity < _NO_ZEROS:
        zeros = format_percent(sparsity)
        return (
            f"{zeros} of its Conv weights are zero: the file holds no pruned weights. If the model was pruned, apply "
            "the masks to the weights before exporting it ('prune.remove' in PyTorch)."
        )
    bar = "" if job.min_sparsity is not None else " --min-sparsity lowers the bar;"
    return f"'sparseconv tune' measures which layers gain here;{bar} --force rewrites whatever can be rewritten."


def _print_next_steps(job: Job, report: ConversionReport) -> None:
    say()
    if report.output is None:
        say("Dry run: nothing was written.")
        return
    say(f"Wrote {report.output}. Next, check that the outputs agree, and time it:")
    is_for_gpu = bool(report.targets) or job.precision == "fp16"
    shapes = [layer.input_shape for layer in report.model.layers]
    is_open = any(shape is None or shape[0] is None for shape in shapes)
    batch = ["--batch", str(job.batches[0])] if job.batches and is_open else []
    for step in ("verify", "bench"):
        # As it will run on a GPU, where floats may be rounded to TF32.
        rounded = ["--tf32"] if step == "verify" and job.precision != "fp16" else []
        more = ["--provider", "cuda", *rounded, *batch] if is_for_gpu else []
        say_command(shlex.join(["sparseconv", step, str(job.model), str(report.output), *more]))


def print_summary(outcomes: Sequence[Outcome[Job, ConversionReport]]) -> None:
    """Print a table of several models."""
    columns = (Column("model", fold=True), Column("result"), Column("sparse", right=True), Column("file", right=True))
    rows = []
    for outcome in outcomes:
        report = outcome.result
        if report is None:
            rows.append((str(outcome.item.model), "error", "", ""))
            continue
        sparse = f"{report.model.num_rewritten} of {len(report.model.layers)}"
        sizes = f"{format_bytes(report.bytes_before)} -> {format_bytes(report.bytes_after)}" if report.changed else ""
        rows.append(
            (str(outcome.item.model), _result_word(outcome.item, report), sparse if report.converted else "0", sizes)
        )
    say()
    say_table(Table(columns, tuple(rows)))


def _result_word(job: Job, report: ConversionReport) -> str:
    if report.converted:
        return "would convert" if job.dry_run else "converted"
    if report.is_half:
        return "would be float16" if job.dry_run else "now float16"
    if report.changed:
        return "images added"
    return "already converted" if report.already_converted else "nothing qualifies"
