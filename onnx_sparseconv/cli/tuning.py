"""Options and text that ``tune`` and ``convert --tune`` share."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_sparseconv.cli.console import Column, Table, format_percent, format_time, say, shown_name
from onnx_sparseconv.cli.options import ProviderChoice
from onnx_sparseconv.text import count

if TYPE_CHECKING:
    from onnx_sparseconv.converter.conversion import Precision
    from onnx_sparseconv.converter.decisions import Decisions, LayerDecision
    from onnx_sparseconv.kernels.targets import NvrtcChoice
    from onnx_sparseconv.tuner import TuneOptions


class PresetChoice(enum.StrEnum):
    """How much time to spend."""

    QUICK = "quick"
    DEFAULT = "default"
    THOROUGH = "thorough"


PresetOption = Annotated[
    PresetChoice,
    typer.Option("--preset", help="How long to time each layer. thorough also times layers that cannot win."),
]
BatchesOption = Annotated[
    list[int] | None,
    typer.Option(
        "--batch",
        min=1,
        help="Batch size to decide for, where the model leaves it open. May be repeated. Default: 1; with --target and "
        "no tuning, both 1 and 64.",
        show_default=False,
    ),
]
ShapesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME:1x3x224x224",
        help="Shape of an input to tune for, where the model leaves it open. May be repeated, for an input too.",
        show_default=False,
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="SECONDS",
        min=0.0,
        help="Begin no layer after this time; the rest is decided by its sparsity. Default: no limit.",
        show_default=False,
    ),
]
DatabaseOption = Annotated[
    Path | None,
    typer.Option(
        "--database",
        metavar="FILE",
        help="Where measurements are kept, so that a tune resumes. Default: a file in the user's cache folder.",
        show_default=False,
    ),
]
RequireGainOption = Annotated[
    bool,
    typer.Option(
        "--require-gain",
        help="End with exit code 7 where the model as a whole does not get faster.",
        show_default=False,
    ),
]
TimedTargetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        metavar="sm_NN|native",
        help="With CUDA: also time GPU kernels generated for this architecture, which this machine's GPU must run; "
        "native: for this GPU. May be repeated: images are then made for all, and timed for one. Needs NVRTC.",
        show_default=False,
    ),
]
CudaGraphOption = Annotated[
    bool,
    typer.Option(
        "--cuda-graph",
        help="With CUDA: time whole models as a CUDA graph. Single layers always are, where they can.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class TuneArguments:
    """What the options ask for, as it was given."""

    provider: ProviderChoice
    threads: int | None
    preset: PresetChoice
    budget: float | None
    database: Path | None
    batches: tuple[int, ...]
    shapes: tuple[str, ...]
    cuda_graph: bool = False

    def given(self, *, but: Sequence[str] = ()) -> str:
        """The first option that is not at its default; empty for none, or only some that have another use."""
        changed = {
            "--preset": self.preset is not PresetChoice.DEFAULT,
            "--provider": self.provider is not ProviderChoice.CPU,
            "--threads": self.threads is not None,
            "--batch": bool(self.batches),
            "--shape": bool(self.shapes),
            "--budget": self.budget is not None,
            "--database": self.database is not None,
            "--cuda-graph": self.cuda_graph,
        }
        return next((name for name, is_changed in changed.items() if is_changed and name not in but), "")

    def options(
        self,
        *,
        targets: Sequence[str] = (),
        nvrtc: NvrtcChoice = "auto",
        jobs: int | None = None,
        cache_dir: Path | None = None,
        precision: Precision = "keep",
        fp16_io: bool = False,
        keep_float: Sequence[str] = (),
    ) -> TuneOptions:
        """The same for `tune`, with how the model will be converted: see `ConvertOptions`.

        Raises:
            UsageError: a shape cannot be read, or what is asked for needs another provider.
        """
        from onnx_sparseconv.tuner import TuneOptions, make_cases  # noqa: PLC0415

        return TuneOptions(
            provider=self.provider.value,
            threads=self.threads,
            cases=make_cases(self.batches, self.shapes),
            preset=self.preset.value,
            budget_s=self.budget,
            database=self.database,
            targets=tuple(targets),
            cuda_graph=self.cuda_graph,
            precision=precision,
            fp16_io=fp16_io,
            keep_float=tuple(keep_float),
            nvrtc=nvrtc,
            jobs=jobs,
            cache_dir=cache_dir,
        )


def decisions_table(decisions: Decisions) -> Table:
    """One row a layer: times of it alone, what was chosen for the model, and what that rests on."""
    columns = (
        Column("layer", fold=True),
        Column("zeros", right=True),
        Column("dense, alone", right=True),
        Column("sparse, alone", right=True),
        Column("choice"),
        Column("decided by", fold=True),
    )
    return Table(columns, tuple(_row(layer) for layer in decisions.layers))


def say_whole(decisions: Decisions) -> None:
    """Print what the check of the whole model gave."""
    whole: Any = decisions.whole_model
    if not whole:
        say("whole model   no layer gains by being sparse, so all stay dense")
        return
    say(f"whole model   {whole['text']}", hang=14)
    for trial in whole["trials"] if len(whole["trials"]) > 1 else ():
        measured = ", ".join(format_time(time) for time in trial["measured_us"])
        predicted = ", ".join(format_time(time) for time in trial["predicted_us"])
        say(f"  tried: {count(trial['num_sparse'], 'sparse layer')}: {measured} ({predicted} predicted)")


def has_gain(decisions: Decisions) -> bool:
    """Whether the converted model was faster as a whole."""
    return bool(decisions.whole_model.get("gain"))


def _row(layer: LayerDecision) -> tuple[str, ...]:
    name = f"{layer.node} (in {layer.graph})" if layer.graph else layer.node
    times = {str(choice): _best(layer, str(choice)) for choice in ("dense", "sparse")}
    alike = " (alike)" if layer.measured_as else ""
    return (
        shown_name(name),
        format_percent(layer.sparsity),
        times["dense"],
        times["sparse"],
        _choice(layer),
        str(layer.cause).replace("-", " ") + alike,
    )


def _choice(layer: LayerDecision) -> str:
    """How it is to run, with the kernels that were chosen for GPUs."""
    if layer.choice != "sparse" or not layer.kernels:
        return str(layer.choice)
    return f"sparse, {', '.join(map(str, layer.kernels.values()))}"


def _best(layer: LayerDecision, choice: str) -> str:
    """The fastest candidate of a kind, at each of the tuned shapes."""
    rows = [one.times_us for one in layer.candidates if one.choice == choice and one.counts]
    if not rows:
        return "-"
    best = [min(times) for times in zip(*rows, strict=True)]
    return ", ".join(format_time(time) if time < float("inf") else "cannot run" for time in best)
