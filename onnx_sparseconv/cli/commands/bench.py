"""``sparseconv bench``: how much faster is the converted model?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_sparseconv.cli import failures
from onnx_sparseconv.cli.console import (
    Column,
    Table,
    format_change,
    format_shape,
    format_time,
    progress_bar,
    say,
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
    DenseChoice,
    InputsOption,
    JsonOption,
    KernelChoice,
    KernelOption,
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
    from onnx_sparseconv.runtime.bench import BenchModel, BenchReport
    from onnx_sparseconv.runtime.layer_times import LayerTime

NAME = "bench"
_MAX_OPS = 6


@failures.command
def command(
    original: OriginalArgument,
    converted: ConvertedArgument,
    *,
    provider: ProviderOption = ProviderChoice.CPU,
    batch: BatchOption = None,
    shape: ShapeOption = None,
    inputs: InputsOption = None,
    threads: ThreadsOption = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="Time to spend on measuring.")] = 10.0,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Runs of each model before measuring.")] = 3,
    seed: SeedOption = 0,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Run both models as a CUDA graph.", show_default=False)
    ] = False,
    dense_options: Annotated[
        DenseChoice,
        typer.Option(
            "--dense-options",
            help="Options of ONNX Runtime's CUDA provider to time each model with, besides --cuda-graph: its defaults, "
            "prefer_nhwc, or the best of both.",
        ),
    ] = DenseChoice.BEST,
    rotate: Annotated[
        int,
        typer.Option(
            "--rotate", min=1, help="Copies of inputs and outputs in GPU memory, used in turn to get past its cache."
        ),
    ] = 1,
    kernel: KernelOption = KernelChoice.AUTO,
    json: JsonOption = False,
    output: ReportFileOption = None,
) -> ExitCode:
    """Time both models side by side, as a whole and layer by layer.

    They run in turn, with the same inputs and threads, so that whatever else the machine does slows both down alike.
    The original runs in plain ONNX Runtime with all its optimisations. On CUDA inputs and outputs stay in GPU memory,
    and each model counts with the fastest of the options that were tried.
    """
    from onnx_sparseconv.runtime.bench import CudaBench, bench  # noqa: PLC0415
    from onnx_sparseconv.runtime.inputs import parse_shapes  # noqa: PLC0415
    from onnx_sparseconv.runtime.timing import TimingPlan  # noqa: PLC0415

    if inputs is not None and (shape or batch is not None):
        raise UsageError("--inputs fixes the shapes: leave --shape and --batch out")
    if output is not None:
        require_inputs_spared(output, [p for p in (original, converted, inputs) if p is not None])
    cuda = CudaBench(dense_options.value, cuda_graph, rotate, kernel_config(kernel))
    plan = TimingPlan(warmup=warmup, seconds=seconds)
    with failures.stdout_kept_clean(), progress_bar("timing") as advance:
        report = bench(
            original,
            converted,
            provider=provider.value,
            threads=threads,
            batch=batch,
            shapes=parse_shapes(shape or []),
            inputs=inputs,
            seed=seed,
            cuda=None if cuda == CudaBench(config={}) else cuda,
            plan=plan,
            on_round=lambda done: advance(done, plan.max_rounds, "rounds"),
        )
    if not json:
        print_report(report)
    emit(document(NAME, report), to_stdout=json, file=output)
    return ExitCode.DONE


def print_report(report: BenchReport) -> None:
    """Print a benchmark."""
    shapes = ", ".join(f"{name} {format_shape(shape)}" for name, shape in report.input_shapes.items()) or "none"
    threads = "ONNX Runtime's choice of threads" if report.threads is None else count(report.threads, "thread")
    environment = report.environment
    processor = f"{environment.cpu}, {count(environment.cpu_cores_usable, 'core')}"
    say_field("machine", ", ".join([processor, *(gpu.name for gpu in environment.cuda.gpus)]))
    say_field("versions", _versions(environment.versions))
    say_field("run", f"{report.provider}, {threads}; inputs {report.inputs}: {shapes}")
    say_field("memory", report.memory)
    for line in kernel_lines(report.kernels):
        say_field("kernel", line)
    for model, name in ((report.original, "original"), (report.converted, "converted")):
        for line in elsewhere_lines(model.nodes_elsewhere):
            say_field("on CPU", f"{name}: {line}")
    say()
    say_table(_models_table(report.original, report.converted))
    if len(report.candidates) > 2:
        say()
        say_table(_candidates_table(report))
    say()
    if any(layer.original_us is not None or layer.converted_us is not None for layer in report.layers):
        say_table(_layers_table(report.layers))
        if report.unmatched:
            say(f"?: ONNX Runtime fused or renamed {count(len(report.unmatched), 'layer')} beyond recognition")
        say("A Conv may have taken in nodes behind it, a sparse one other than a dense one: compare totals too.")
        say()
    for note in report.notes:
        say(f"note: {note}", hang=2)
    say_field("file", format_change(report.original.size_bytes, report.converted.size_bytes))
    say_field("speed-up", _speedup_text(report))


def _speedup_text(report: BenchReport) -> str:
    gain = report.speedup
    spread = f"{gain.low:.2f}x to {gain.high:.2f}x in 8 of 10 rounds"
    # Unless nearly all rounds agree, noise decides which of the two looks faster.
    word = "faster" if gain.low > 1 else "SLOWER than the original" if gain.high < 1 else "no clear difference"
    return f"{gain.of_medians:.2f}x of medians ({spread}): {word}"


def _versions(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)


def _models_table(original: BenchModel, converted: BenchModel) -> Table:
    titles = ("median", "mean", "p90", "p99", "min")
    columns = (Column("", fold=False), *(Column(title, right=True) for title in titles), Column("runs", right=True))
    rows = []
    for name, model in (("original", original), ("converted", converted)):
        stats = model.time
        times = (stats.median_us, stats.mean_us, stats.p90_us, stats.p99_us, stats.min_us)
        rows.append((name, *(format_time(t) for t in times), str(stats.num_runs)))
    return Table(columns, tuple(rows))


def _candidates_table(report: BenchReport) -> Table:
    """Every mode that was tried; the fastest of each model is the one in the other table."""
    columns = (
        Column("", fold=False),
        Column("options", fold=False),
        Column("median", right=True),
        Column("", fold=True),
    )
    chosen = {"original": report.original.mode, "converted": report.converted.mode}
    rows = [
        (
            candidate.model,
            candidate.mode,
            format_time(candidate.time.median_us) if candidate.time is not None else "-",
            candidate.problem or ("fastest" if candidate.mode == chosen[candidate.model] else ""),
        )
        for candidate in report.candidates
    ]
    return Table(columns, tuple(rows))


def _layers_table(layers: tuple[LayerTime, ...]) -> Table:
    columns = (
        Column("layer", fold=True),
        Column("runs as", fold=False),
        Column("original", right=True),
        Column("converted", right=True),
        Column("speed-up", right=True),
    )
    rows = [
        (
            shown_name(layer.name),
            "dense" if layer.converted_op == "Conv" else "scale" if layer.stands_for else "sparse",
            format_time(layer.original_us),
            format_time(layer.converted_us),
            "?" if layer.speedup is None else f"{layer.speedup:.2f}x",
        )
        for layer in layers
    ]
    return Table(columns, tuple(rows))
