"""Folders of models: what was not converted before from the same is converted, and a page links the reports of all.

A model that fails leaves the others alone, and every file appears whole, so that a run may be stopped at any time: the
next one goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onnx_sparseconv.cli.batch import attempt, run_all
from onnx_sparseconv.cli.console import Advance, progress_bar
from onnx_sparseconv.cli.conversion.converted import is_converted, left_alone_document
from onnx_sparseconv.cli.conversion.folder_plan import FolderOptions, Task, plan_tasks
from onnx_sparseconv.cli.conversion.folder_summary import (
    Done,
    FolderOutcome,
    document_of,
    exit_code,
    print_line,
    print_table,
    write_summary,
)
from onnx_sparseconv.cli.conversion.job import Job
from onnx_sparseconv.cli.conversion.records import made_from, make_record, read_record, remove_written, why_again
from onnx_sparseconv.cli.conversion.reports import page_of, write_reports
from onnx_sparseconv.cli.conversion.work import convert_model, report_document
from onnx_sparseconv.cli.exit_codes import ExitCode
from onnx_sparseconv.cli.json_output import emit
from onnx_sparseconv.cli.paths import directories
from onnx_sparseconv.files import is_directory, write_text


def convert_folders(models: Sequence[Path], settings: Job, options: FolderOptions) -> ExitCode:
    """Convert all models of folders, and write a summary of them.

    Args:
        models: folders, and models beside them.
        settings: what to do with each.
        options: how to go about it.

    Raises:
        SparseConvError: nothing could be begun, or the summary cannot be written.
    """
    tasks = plan_tasks(models, settings, options)
    title = ", ".join(dict.fromkeys(model.resolve().name or str(model) for model in models if is_directory(model)))
    outcomes: list[FolderOutcome] = []
    wanted = [path.parent for task in tasks if task.record for path in (task.job.output, task.record) if path]
    # Before processes write to them, which would else make and remove them under each other's hands.
    with directories(wanted):
        try:
            for outcome in _run(tasks, options.jobs):
                outcomes.append(outcome)
                print_line(outcome, len(outcomes), len(tasks))
        except KeyboardInterrupt:
            write_summary(outcomes, options, title, interrupted=True)
            raise
        print_table(outcomes)
        write_summary(outcomes, options, title, interrupted=False)
    write_reports(options.reports, [document_of(outcome) for outcome in outcomes], title)
    return exit_code(outcomes)


def convert_in_folder(task: Task, advance: Advance | None = None) -> Done:
    """Convert one model, unless that was done before, and write its reports; other processes run this, too."""
    job, output = task.job, task.job.output
    if task.record is None or task.page is None or output is None:
        return Done(_convert(job, advance))
    origin = made_from(job)
    record = read_record(task.record, output)
    remark = "" if record is None else why_again(record, origin, output)
    if record is not None and not remark and not task.redo:
        found = dict(record.document)
        if not task.page.is_file():
            write_text(task.page, page_of([found], str(job.model)))
        return Done({**found, "up_to_date": True}, up_to_date=True)
    found = _convert(job, advance)
    written = output if found["output"] is not None else None
    if written is None and record is not None and remove_written(record, output):
        remark = "; ".join(filter(None, (remark, "what an earlier run had written was removed")))
    write_text(task.page, page_of([found], str(job.model)))
    # Last of all: it says that all the rest is there.
    emit(make_record(found, origin, written), to_stdout=False, file=task.record)
    return Done(found, remark=remark)


def _convert(job: Job, advance: Advance | None) -> dict[str, Any]:
    """Convert a model; one that was converted before is left alone, unless something new is asked for."""
    if not (job.targets or job.precision != "keep" or job.force) and is_converted(job.model):
        return left_alone_document(job.model)
    return report_document(job, convert_model(job, advance))


def _run(tasks: Sequence[Task], jobs: int) -> Iterator[FolderOutcome]:
    """Work on all, with a progress bar: over the layers of a model where there is one at a time."""
    if jobs > 1:
        outcomes = run_all(convert_in_folder, tasks, jobs)
        for number, task in enumerate(tasks):
            with progress_bar("converting") as advance:
                advance(number, len(tasks), task.name)
                outcome = next(outcomes)
            yield outcome
        return
    for task in tasks:
        with progress_bar() as advance:
            outcome = attempt(_with_bar(advance), task)
        yield outcome


def _with_bar(advance: Advance) -> Callable[[Task], Done]:
    return lambda task: convert_in_folder(task, advance)
