"""Converting one model, and what is to be said of that as data."""

from __future__ import annotations

import functools
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from onnx_sparseconv.cli.batch import Outcome
from onnx_sparseconv.cli.console import Advance
from onnx_sparseconv.cli.conversion.job import Job
from onnx_sparseconv.cli.exit_codes import ExitCode
from onnx_sparseconv.cli.json_output import document
from onnx_sparseconv.cli.tuning import has_gain
from onnx_sparseconv.errors import SparseConvError
from onnx_sparseconv.runtime.plain import to_plain

if TYPE_CHECKING:
    from onnx_sparseconv.converter.decisions import Decisions
    from onnx_sparseconv.converter.report import ConversionReport
    from onnx_sparseconv.tuner import TuneOptions

COMMAND = "convert"


def convert_model(job: Job, advance: Advance | None = None) -> ConversionReport:
    """Convert one model."""
    from onnx_sparseconv.converter import ConvertOptions, convert  # noqa: PLC0415

    decisions, notes = _decide(job, advance)
    options = ConvertOptions(
        min_sparsity=job.min_sparsity,
        force=job.force,
        decisions=decisions,
        dry_run=job.dry_run,
        targets=job.targets,
        batches=job.batches,
        nvrtc=job.nvrtc,
        jobs=job.compile_jobs,
        cache_dir=job.cache_dir,
        precision=job.precision,
        fp16_io=job.fp16_io,
        keep_float=job.keep_float,
    )
    steps = [_named(advance, verb) if advance is not None else None for verb in ("converting", "compiling")]
    _, report = convert(job.model, job.output, options, progress=steps[0], compile_progress=steps[1])
    return replace(report, notes=(*report.notes, *notes))


def _decide(job: Job, advance: Advance | None) -> tuple[Decisions | None, tuple[str, ...]]:
    """The decisions that were asked for, out of a file or measured now, and what has to be known of them."""
    if job.decisions is not None:
        from onnx_sparseconv.converter import read_decisions  # noqa: PLC0415
        from onnx_sparseconv.tuner import machine_notes  # noqa: PLC0415

        decisions = read_decisions(job.decisions)
        return decisions, machine_notes(decisions)
    if job.tune is None:
        return None, ()
    from onnx_sparseconv.tuner import tune  # noqa: PLC0415

    decisions = tune(job.model, job.tune, progress=_named(advance, "timing") if advance else None).decisions
    if job.find_peaks:
        decisions = with_peaks(decisions, job.tune)
    return decisions, decisions.notes


def with_peaks(decisions: Decisions, options: TuneOptions) -> Decisions:
    """Put into decisions what the machine that measured can do at most; a note where that cannot be found out."""
    if not any(layer.candidates for layer in decisions.layers):
        return decisions
    from onnx_sparseconv.runtime.peaks import find_peaks  # noqa: PLC0415

    try:
        peaks = find_peaks(options.provider, options.threads)
    except SparseConvError as error:
        return replace(decisions, notes=(*decisions.notes, f"the peaks of this machine are not known: {error}"))
    return replace(decisions, setting={**decisions.setting, "peaks": to_plain(peaks)})


def _named(advance: Advance, verb: str) -> Advance:
    """A progress bar's function that says what is being done."""
    return lambda done, total, what: advance(done, total, f"{verb} {what}")


def exit_code(outcome: Outcome[Job, ConversionReport]) -> ExitCode:
    """The exit code of one model."""
    return outcome.code if outcome.result is None else code_of(outcome.item, outcome.result)


def code_of(job: Job, report: ConversionReport) -> ExitCode:
    """The exit code of a model that could be worked on."""
    if job.require_gain and (report.decisions is None or not has_gain(report.decisions)):
        return ExitCode.NO_GAIN
    return ExitCode.DONE if report.changed else ExitCode.NOTHING_QUALIFIED


def outcome_document(outcome: Outcome[Job, ConversionReport]) -> dict[str, Any]:
    """What became of one model, as a JSON document."""
    if outcome.result is None:
        return error_document(str(outcome.item.model), outcome.error, outcome.code)
    return report_document(outcome.item, outcome.result)


def report_document(job: Job, report: ConversionReport) -> dict[str, Any]:
    """The report of one model as a JSON document, with the versions that made it."""
    return document(COMMAND, {**to_plain(report), **made_by(), "exit_code": int(code_of(job, report))})


def error_document(source: str, error: str, code: ExitCode) -> dict[str, Any]:
    """A model that could not be worked on, as a JSON document."""
    return document(COMMAND, {"source": source, "error": error, **made_by(), "exit_code": int(code)})


def made_by() -> dict[str, Any]:
    """When a report is made, and with what."""
    return {"created": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "versions": _versions()}


@functools.cache
def _versions() -> dict[str, str | None]:
    from onnx_sparseconv.runtime.environment import package_versions  # noqa: PLC0415

    return package_versions()
