"""Whether a model of a folder was converted before, from the same content, with the same options and versions.

What an earlier run did stands in the model's report: the hashes of what was read and written, and all that decides
what becomes of a model. A report that cannot be read, or that is of another form, is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_sparseconv.cli.conversion.job import Job
from onnx_sparseconv.cli.exit_codes import ExitCode
from onnx_sparseconv.cli.json_output import SCHEMA_VERSION
from onnx_sparseconv.errors import ModelError, ReportError
from onnx_sparseconv.runtime.plain import to_plain

# Counts changes to what is recorded.
RECORD_VERSION = 1
# Fields of a `Job`, and of what it tunes for, that do not change what becomes of a model: where it is, how fast it is
# made, what is said of it.
_NO_OPTIONS = frozenset(
    {"model", "output", "dry_run", "compile_jobs", "cache_dir", "require_gain", "find_peaks", "jobs", "database"}
)
_COMPILERS = tuple(
    f"nvidia-{tool}{suffix}" for tool in ("cuda-nvrtc", "nvfatbin", "nvjitlink") for suffix in ("-cu12", "")
)
_CHUNK_BYTES = 1 << 20
_SEVERAL = ("the options", "the versions")


@dataclass(frozen=True)
class Record:
    """What an earlier run did.

    Attributes:
        document: the model's report.
        made_from: what decided, as `made_from` gives it.
        written: hashes of the files that were written, by their names.
    """

    document: Mapping[str, Any]
    made_from: Mapping[str, Any]
    written: Mapping[str, str]


def made_from(job: Job) -> dict[str, Any]:
    """All that decides what becomes of a model: content, options, versions, and, for measurements, the machine.

    Raises:
        ModelError: the model cannot be read.
        NativeLibraryError: with tuning, what it needs is missing.
    """
    from onnx_sparseconv.runtime.environment import distribution_version, package_versions  # noqa: PLC0415

    versions = package_versions()
    names = ["onnx-sparseconv", "onnx", "onnx-graphsurgeon"]
    found: dict[str, Any] = {name: versions[name] for name in names}
    if job.targets:
        found |= {name: distribution_version(name) for name in _COMPILERS}
    return {
        "record_version": RECORD_VERSION,
        "content": source_digest(job.model),
        "options": _options(job),
        "versions": found,
        "machine": _machine(job),
    }


def _options(job: Job) -> dict[str, Any]:
    options: dict[str, Any] = {name: value for name, value in to_plain(job).items() if name not in _NO_OPTIONS}
    if options["tune"] is not None:
        options["tune"] = {name: value for name, value in options["tune"].items() if name not in _NO_OPTIONS}
    return options


def _machine(job: Job) -> dict[str, Any] | None:
    """Where it is measured; None where nothing is."""
    if job.tune is None:
        return None
    from onnx_sparseconv.tuner.setting import read_setting  # noqa: PLC0415

    return dict(read_setting(job.tune.provider, job.tune.threads))


def source_digest(path: Path) -> str:
    """Hash of a model's file and of the files that its external data are in.

    Raises:
        ModelError: the model's file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        _add_file(digest, path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    for data in _data_files(path):
        digest.update(b"\0" + str(data.relative_to(path.parent)).encode(errors="surrogateescape") + b"\0")
        # One that is missing, or cannot be read, is the converter's to tell.
        with contextlib.suppress(OSError):
            if data.is_file():
                _add_file(digest, data)
    return digest.hexdigest()


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)


def file_digest(path: Path) -> str:
    """Hash of a file; empty where it cannot be read."""
    digest = hashlib.sha256()
    try:
        _add_file(digest, path)
    except OSError:
        return ""
    return digest.hexdigest()


def written_files(output: Path | None) -> list[Path]:
    """The files of a converted model: its own, and that of its external data where it has some."""
    if output is None or not output.is_file():
        return []
    return [output, *(path for path in _data_files(output) if path.is_file())]


def _data_files(path: Path) -> list[Path]:
    from onnx_sparseconv.converter.model_io import data_files  # noqa: PLC0415

    return data_files(path)


def _data_name(output: Path) -> str:
    from onnx_sparseconv.converter.model_io import data_name  # noqa: PLC0415

    return data_name(output)


def make_record(document: Mapping[str, Any], origin: Mapping[str, Any], output: Path | None) -> dict[str, Any]:
    """The report of a model with what a later run has to know."""
    written = {path.name: file_digest(path) for path in written_files(output)}
    return {**document, "made_from": dict(origin), "written": written}


def read_record(path: Path, output: Path) -> Record | None:
    """What an earlier run did; None where nothing is known of one.

    Args:
        path: the model's report.
        output: the model that such a run would have written.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        return None
    origin, written = content.pop("made_from", None), content.pop("written", None)
    if not isinstance(origin, dict) or not isinstance(written, dict):
        return None
    if not written.keys() <= {output.name, _data_name(output)} or not _is_report(content):
        return None
    return Record(content, origin, written)


def _is_report(content: Mapping[str, Any]) -> bool:
    """Whether all that a summary needs can be read."""
    from onnx_sparseconv.report import read_report  # noqa: PLC0415

    code = content.get("exit_code")
    if type(code) is not int or code not in set(ExitCode) or not isinstance(content.get("source"), str):
        return False
    try:
        read_report(content)
    except ReportError:
        return False
    return True


def why_again(record: Record, origin: Mapping[str, Any], output: Path) -> str:
    """What has changed since an earlier run, in words; empty where nothing has."""
    names = {
        "record_version": "the form of the record",
        "content": "the model",
        "options": "the options",
        "versions": "the versions",
        "machine": "the machine",
    }
    # As it would be read back: JSON has lists only.
    now = json.loads(json.dumps(to_plain(origin)))
    changed = [words for name, words in names.items() if record.made_from.get(name) != now.get(name)]
    if changed:
        is_one = len(changed) == 1 and changed[0] not in _SEVERAL
        return f"{' and '.join(changed)} {'has' if is_one else 'have'} changed"
    if not is_as_written(record, output):
        return "what was written is no longer there, or was changed"
    return ""


def is_as_written(record: Record, output: Path) -> bool:
    """Whether the files that a run wrote are still what it wrote."""
    return all(file_digest(output.with_name(name)) == digest for name, digest in record.written.items())


def remove_written(record: Record, output: Path) -> bool:
    """Remove what an earlier run wrote, so that nothing is left that the options of now would not make.

    Files that were changed since are left alone.

    Returns:
        Whether anything was removed.

    Raises:
        ModelError: a file cannot be removed.
    """
    if not record.written or not is_as_written(record, output):
        return False
    for name in record.written:
        path = output.with_name(name)
        try:
            path.unlink()
        except OSError as error:
            raise ModelError(f"{path}: cannot be removed: {error.strerror or error}") from error
    return True
