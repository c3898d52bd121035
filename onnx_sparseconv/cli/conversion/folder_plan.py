"""Which models are in a folder, and where what is made of each goes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnx_sparseconv.cli.conversion.job import Job, check_out_dir, check_reports, check_settings, place
from onnx_sparseconv.cli.paths import require_distinct, require_no_inputs
from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.files import identities, is_directory

SUFFIX = ".onnx"
SUMMARY_PAGE, SUMMARY_DATA, REPORTS = "index.html", "index.json", "reports"


@dataclass(frozen=True)
class FolderOptions:
    """How to convert folders.

    Attributes:
        out_dir: where everything goes; None on a dry run.
        reports: files that ``--report`` names.
        jobs: models at a time.
        redo: also convert what has not changed since.
    """

    out_dir: Path | None
    reports: tuple[Path, ...]
    jobs: int
    redo: bool


@dataclass(frozen=True)
class Task:
    """One model of a folder.

    Attributes:
        job: what to do; its output is what would be written on a run that is not dry.
        name: its path below the folder, with ``/``.
        record: where its report goes as data; None on a dry run.
        page: where its report goes as a page; None on a dry run.
        redo: convert it even if nothing has changed.
    """

    job: Job
    name: str
    record: Path | None
    page: Path | None
    redo: bool

    @property
    def model(self) -> Path:
        """What messages call it."""
        return self.job.model


def find_models(folder: Path, out_dir: Path | None) -> list[Path]:
    """All models below a folder, in the order of their names.

    Hidden files and folders are left out, and so is the folder that is written to. Links to folders are not followed;
    links to files are models.

    Raises:
        UsageError: there is none.
        ModelError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error

    left_out = identities(out_dir) if out_dir is not None else frozenset()
    found: list[Path] = []
    for directory, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not identities(Path(directory) / name) & left_out
        )
        found += [
            Path(directory) / name
            for name in sorted(files)
            if name.lower().endswith(SUFFIX) and not name.startswith(".") and (Path(directory) / name).is_file()
        ]
    if not found:
        raise UsageError(f"{folder}: there is no {SUFFIX} file in it, or below it")
    return found


def plan_tasks(models: Sequence[Path], settings: Job, options: FolderOptions) -> list[Task]:
    """Find all models, and decide where what is made of each goes.

    Args:
        models: folders, and models beside them.
        settings: what to do with each; its compilers are those of all models together, which share them.
        options: how to go about it.

    Raises:
        UsageError: no folder to write to, or an output that is an input, or that of another model.
        ModelError: a folder cannot be read.
    """
    check_settings(settings)
    out_dir = options.out_dir
    if out_dir is None and not settings.dry_run:
        raise UsageError("give the folder for the converted models: --out-dir DIR (or --dry-run to write nothing)")
    check_out_dir(out_dir)
    for model in models:
        if out_dir is not None and identities(model) & identities(out_dir):
            raise UsageError(f"--out-dir {out_dir} is the folder of the models: give another one")
    found: list[tuple[Path, Path]] = []
    for model in models:
        if is_directory(model):
            found += [(path, path.relative_to(model)) for path in find_models(model, out_dir)]
        else:
            found.append((model, Path(model.name)))
    outputs = [None if out_dir is None else out_dir / relative for _, relative in found]
    if settings.compile_jobs is not None:
        share = settings.compile_jobs // min(options.jobs, len(found))
        settings = replace(settings, compile_jobs=max(1, share))
    jobs = place([path for path, _ in found], outputs, settings)
    tasks = [_task(job, relative, options) for job, (_, relative) in zip(jobs, found, strict=True)]
    _check_written(tasks, options)
    return tasks


def _task(job: Job, relative: Path, options: FolderOptions) -> Task:
    if options.out_dir is None or job.dry_run:
        return Task(job, relative.as_posix(), None, None, options.redo)
    report = options.out_dir / REPORTS / relative
    record, page = (report.with_name(f"{relative.name}{suffix}") for suffix in (".json", ".html"))
    return Task(job, relative.as_posix(), record, page, options.redo)


def _check_written(tasks: Sequence[Task], options: FolderOptions) -> None:
    """Refuse reports that could not be written, or that would take the place of something else."""
    check_reports(options.reports, [task.job for task in tasks], options.out_dir)
    summary = [] if options.out_dir is None else [options.out_dir / SUMMARY_PAGE, options.out_dir / SUMMARY_DATA]
    outputs = [path for task in tasks for path in (task.job.output, task.record, task.page) if path is not None]
    require_no_inputs(summary, [task.model for task in tasks])
    require_distinct([*options.reports, *summary, *outputs])
