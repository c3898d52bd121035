"""``sparseconv verify``: do a model and its converted form give the same outputs?"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_sparseconv.cli import failures
from onnx_sparseconv.cli.console import (
    Column,
    Table,
    format_percent,
    format_shape,
    is_wide,
    say,
    say_command,
    say_field,
    say_table,
    shown_name,
)
from onnx_sparseconv.cli.exit_codes import ExitCode
from onnx_sparseconv.cli.json_output import document, emit
from onnx_sparseconv.cli.kernel_text import elsewhere_lines, kernel_config, kernel_lines
from onnx_sparseconv.cli.options import (
    BatchOption,
    ConvertedArgument,
    InputsOption,
    JsonOption,
    KernelChoice,
    KernelOption,
    NoLibraryOption,
    OriginalArgument,
    ProviderChoice,
    ProviderOption,
    ReportFileOption,
    SeedOption,
    ShapeOption,
    ThreadsOption,
)
from onnx_sparseconv.cli.paths import require_inputs_spared
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.text import count

if TYPE_CHECKING:
    from onnx_sparseconv.runtime.metrics import OutputComparison
    from onnx_sparseconv.runtime.verify import VerifyReport

NAME = "verify"


@failures.command
def command(
    original: OriginalArgument,
    converted: ConvertedArgument,
    *,
    provider: ProviderOption = ProviderChoice.CPU,
    inputs: InputsOption = None,
    shape: ShapeOption = None,
    batch: BatchOption = None,
    seed: SeedOption = 0,
    no_library: NoLibraryOption = False,
    rtol: Annotated[
        float | None,
        typer.Option(
            "--rtol", min=0.0, help="Relative part of the tolerance. Default: derived, and stated.", show_default=False
        ),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(
            "--atol", min=0.0, help="Absolute part of the tolerance. Default: derived, and stated.", show_default=False
        ),
    ] = None,
    threads: ThreadsOption = None,
    kernel: KernelOption = KernelChoice.AUTO,
    tf32: Annotated[
        bool,
        typer.Option(
            "--tf32",
            help="On CUDA: allow TF32 in the converted model, as it is by default elsewhere. The tolerance follows.",
            show_default=False,
        ),
    ] = False,
    json: JsonOption = False,
    output: ReportFileOption = None,
) -> ExitCode:
    """Run both models on the same inputs and compare every output.

    The original runs in plain ONNX Runtime on the CPU, the converted one with this package's library. Exit code 3: an
    output differs by more than rounding explains. The tolerance is derived from the model and printed.
    """
    from onnx_sparseconv.runtime.inputs import parse_shapes  # noqa: PLC0415
    from onnx_sparseconv.runtime.verify import verify  # noqa: PLC0415

    if inputs is not None and (shape or batch is not None):
        raise UsageError("--inputs fixes the shapes: leave --shape and --batch out")
    if kernel is not KernelChoice.AUTO and provider is not ProviderChoice.CUDA:
        raise UsageError("--kernel needs --provider cuda")
    if output is not None:
        require_inputs_spared(output, [p for p in (original, converted, inputs) if p is not None])
    with failures.stdout_kept_clean():
        report = verify(
            original,
            converted,
            provider=provider.value,
            config=kernel_config(kernel),
            inputs=inputs,
            shapes=parse_shapes(shape or []),
            batch=batch,
            seed=seed,
            use_library=not no_library,
            tf32=tf32,
            threads=threads,
            rtol=rtol,
            atol=atol,
        )
    if not json:
        print_report(report)
    emit(document(NAME, report), to_stdout=json, file=output)
    return ExitCode.DONE if report.passed else ExitCode.OUTPUTS_DIFFER


def print_report(report: VerifyReport) -> None:
    """Print a comparison."""
    shapes = ", ".join(f"{name} {format_shape(shape)}" for name, shape in report.input_shapes.items()) or "none"
    library = "with the native library" if report.use_library else "without the native library, as a dense model"
    say_field("original", str(report.original))
    say_field("converted", f"{report.converted}, {library}")
    tf32 = ", TF32 allowed" if report.tf32 else ""
    on = "" if report.provider == report.reference_provider else f", the original on {report.reference_provider}"
    say_field("provider", f"{report.provider}{tf32}{on}")
    say_field("inputs", f"{report.inputs}: {shapes}")
    say_field("tolerance", report.tolerance.text)
    say()
    say_table(_outputs_table(report.outputs))
    for output in report.outputs:
        if not output.passed:
            say(f"{output.name}: {output.reason}{_shapes_if_other(output)}")
    say()
    for line in kernel_lines(report.kernels):
        say_field("kernel", line)
    for line in elsewhere_lines(report.nodes_elsewhere):
        say_field("on CPU", line)
    for note in report.notes:
        say(f"note: {note}", hang=2)
    if report.passed:
        doubt = " But see the note: these inputs prove little." if report.insensitive_outputs else ""
        say(f"OK: {count(len(report.outputs), 'output')} within the tolerance.{doubt}")
        if report.kernels and report.use_library:
            say("Next:")
            provider = [] if report.provider == "cpu" else ["--provider", report.provider]
            say_command(shlex.join(["sparseconv", "bench", str(report.original), str(report.converted), *provider]))
    else:
        failed = sum(not output.passed for output in report.outputs)
        say(f"DIFFERENT: {failed} of {count(len(report.outputs), 'output')} outside the tolerance.")


def _shapes_if_other(output: OutputComparison) -> str:
    if (output.shape, output.dtype) == (output.converted_shape, output.converted_dtype):
        return ""
    first, second = format_shape(output.shape), format_shape(output.converted_shape)
    return f" (original {output.dtype} {first}, converted {output.converted_dtype} {second})"


def _outputs_table(outputs: tuple[OutputComparison, ...]) -> Table:
    """One row an output; a narrow terminal leaves some metrics to the JSON report."""
    titles = ["max abs", "rms", "of range", "cosine", "SNR dB", "argmax"]
    shown = [t for t in titles if is_wide() or t != "rms"]
    if all(output.argmax_agreement is None for output in outputs):
        shown.remove("argmax")
    columns = (
        Column(""),
        Column("output", fold=True),
        Column("shape", fold=True),
        *(Column(title, right=True) for title in shown),
    )
    rows = []
    for output in outputs:
        metrics = dict(zip(titles, _metrics(output), strict=True))
        mark = "ok" if output.passed else "DIFF"
        rows.append((mark, shown_name(output.name), format_shape(output.shape), *(metrics[title] for title in shown)))
    return Table(columns, tuple(rows))


def _metrics(output: OutputComparison) -> tuple[str, ...]:
    errors = output.errors
    return (
        _number(errors.max_abs),
        _number(errors.rms),
        _number(errors.max_of_range),
        "-" if errors.cosine_similarity is None else f"{errors.cosine_similarity:.6f}",
        "exact" if output.identical else "-" if errors.snr_db is None else f"{errors.snr_db:.0f}",
        "-" if output.argmax_agreement is None else format_percent(output.argmax_agreement),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"
