"""``sparseconv doctor``: is this installation all right?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from onnx_sparseconv.cli import failures
from onnx_sparseconv.cli.console import format_bytes, say
from onnx_sparseconv.cli.exit_codes import ExitCode
from onnx_sparseconv.cli.json_output import document, emit
from onnx_sparseconv.cli.options import JsonOption, ReportFileOption
from onnx_sparseconv.runtime.plain import to_plain
from onnx_sparseconv.text import count

if TYPE_CHECKING:
    from onnx_sparseconv.runtime.doctor import DoctorReport

NAME = "doctor"


@failures.command
def command(json: JsonOption = False, output: ReportFileOption = None) -> ExitCode:
    """Show what is installed, what conflicts, and which providers really work.

    Every provider is tried with a tiny sparse model. Exit code 6: installed packages contradict each other; 1:
    something is missing or does not work.
    """
    from onnx_sparseconv.runtime.doctor import diagnose  # noqa: PLC0415

    with failures.stdout_kept_clean():
        report = diagnose()
    if not json:
        print_report(report)
    plain = {**to_plain(report), "healthy": report.healthy, "has_conflict": report.has_conflict}
    emit(document(NAME, plain), to_stdout=json, file=output)
    return exit_code(report)


def exit_code(report: DoctorReport) -> ExitCode:
    """The exit code of a diagnosis."""
    if report.has_conflict:
        return ExitCode.CONFLICTING_INSTALLATION
    return ExitCode.DONE if report.healthy else ExitCode.ERROR


def print_report(report: DoctorReport) -> None:
    """Print a diagnosis."""
    environment = report.environment
    say(f"machine      {environment.cpu}, {environment.cpu_cores_usable} of {environment.cpu_cores} cores usable")
    say(f"system       {environment.platform}")
    for gpu in environment.cuda.gpus:
        say(f"gpu          {gpu.name}, compute capability {gpu.compute_capability}, {format_bytes(gpu.memory_bytes)}")
    cuda = environment.cuda
    say(f"driver       {f'{cuda.version} (up to CUDA {cuda.cuda_version})' if not cuda.problem else cuda.problem}")
    say()
    shown = {
        name: version or "not installed" for name, version in environment.versions.items() if "onnxruntime" not in name
    }
    for name, version in shown.items():
        say(f"{name:<18} {version}")
    say(f"{'onnxruntime':<18} {_distributions(report.onnxruntime_distributions)}")
    say(f"{'cupy':<18} {_distributions(report.cupy_distributions)}")
    say()
    library = report.library
    say(f"native library     {library.path or 'not found'}")
    if not library.problem:
        say(f"                   version {library.version}, loads")
    for provider in report.providers:
        mark = "works" if provider.works else "does NOT work" if provider.built_in else "not available"
        kernel = f", kernel {provider.kernel}" if provider.kernel else ""
        say(f"provider {provider.name:<9} {mark}: {provider.text}{kernel}")
    for compiler in report.compilers:
        images = f"images compressed by {compiler.compressor}" if compiler.compressor else "images not compressed"
        parts = f"linked by {compiler.linker}" if compiler.linker else "no nvJitLink to link long ones"
        say(f"compiler           {compiler.name}, for {', '.join(compiler.targets)}; {images}, {parts}", hang=19)
    if not report.compilers:
        say("compiler           NVRTC not found: only needed for convert --target, which compiles GPU kernels")
    cache = report.image_cache
    say(f"GPU image cache    {cache.folder}, {count(cache.images, 'image')}, {format_bytes(cache.size_bytes)}")
    say()
    for problem in report.problems:
        say(f"{'CONFLICT' if problem.conflict else 'PROBLEM'}: {problem.text}", hang=2)
        say(f"  remedy: {problem.remedy}", hang=2)
    if report.healthy:
        say("All is well.")


def _distributions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items()) or "not installed"
