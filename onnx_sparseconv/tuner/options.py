"""What to tune for, and how thoroughly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from onnx_sparseconv.converter import ConvertOptions, Decisions
from onnx_sparseconv.converter.conversion import Precision
from onnx_sparseconv.errors import UsageError
from onnx_sparseconv.kernels.targets import NvrtcChoice
from onnx_sparseconv.runtime.inputs import parse_shape
from onnx_sparseconv.runtime.session import PROVIDERS, Provider, check_threads
from onnx_sparseconv.runtime.timing import TimingPlan

PresetName = Literal["quick", "default", "thorough"]
PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)


@dataclass(frozen=True)
class Preset:
    """How much time to spend.

    Attributes:
        name: what a user calls it.
        layer: how to time a single layer.
        whole: how to time the whole model.
        profiled_runs: runs from which the time of single nodes of a layer is taken.
        max_steps: how many times layers are left dense where the whole model contradicts its layers.
        skip_hopeless: leave out layers that cannot win by the cost model.
        max_plans: how many plans of generated GPU code to time for a layer; None: all that may be fastest.
        sub_batches: time the general GPU kernel with every sub-batch.
    """

    name: PresetName
    layer: TimingPlan
    whole: TimingPlan
    profiled_runs: int
    max_steps: int
    skip_hopeless: bool = True
    max_plans: int | None = 3
    sub_batches: bool = False


PRESETS: Mapping[str, Preset] = {
    "quick": Preset("quick", TimingPlan(2, 3, 40, 3, 0.12), TimingPlan(2, 5, 100, 3, 2.0), 5, 1, max_plans=2),
    "default": Preset("default", TimingPlan(3, 5, 100, 5, 0.6), TimingPlan(3, 7, 200, 5, 8.0), 10, 3),
    "thorough": Preset(
        "thorough", TimingPlan(5, 9, 400, 5, 2.5), TimingPlan(5, 9, 500, 5, 25.0), 20, 4, False, None, True
    ),
}


@dataclass(frozen=True)
class Case:
    """One set of input shapes to tune for.

    Attributes:
        batch: batch size where the model leaves it open; None: 1.
        shapes: shapes of inputs where the model leaves them open.
    """

    batch: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def make_cases(batches: Sequence[int] = (), shapes: Sequence[str] = ()) -> tuple[Case, ...]:
    """Cases from batch sizes and texts such as ``NAME:1x3x224x224``.

    The shapes of several inputs go together. An input that is named again begins a further case. Several batch sizes
    are combined with each.

    Raises:
        UsageError: a text is no shape, or not every case names the same inputs.
    """
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in map(parse_shape, shapes):
        group = next((group for group in groups if name not in group), None)
        if group is None:
            groups.append(group := {})
        group[name] = shape
    if any(group.keys() != groups[0].keys() for group in groups):
        raise UsageError(f"--shape: every shape to tune for needs all of {', '.join(groups[0])}")
    return tuple(Case(batch, group) for group in groups for batch in (batches or (None,)))


@dataclass(frozen=True)
class TuneOptions:
    """What `tune` does.

    Attributes:
        provider: ``cpu`` or ``cuda``.
        threads: threads of a run; None leaves it to ONNX Runtime.
        cases: shapes to tune for. With several of them, each counts by its share of its own model's time.
        preset: ``quick``, ``default`` or ``thorough``.
        budget_s: no layer is begun after so many seconds; the rest is decided by its sparsity. None: no limit.
        database: file of measurements; None: in the user's cache folder.
        targets: on CUDA, architectures that images are to be made for, or ``native``; plans are timed for the one that
            this machine's GPU runs. Empty: only the general kernel is.
        cuda_graph: whole models are timed as a CUDA graph; else none is.
        precision: ``fp16`` tunes what the model is after conversion to float16; the decisions are for the original.
        fp16_io, keep_float: as in `ConvertOptions`.
        nvrtc, jobs, cache_dir: how images are compiled, as in `ConvertOptions`.
    """

    provider: Provider = "cpu"
    threads: int | None = None
    cases: tuple[Case, ...] = (Case(),)
    preset: PresetName = "default"
    budget_s: float | None = None
    database: Path | None = None
    targets: tuple[str, ...] = ()
    cuda_graph: bool = False
    precision: Precision = "keep"
    fp16_io: bool = False
    keep_float: tuple[str, ...] = ()
    nvrtc: NvrtcChoice = "auto"
    jobs: int | None = None
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.provider not in PROVIDERS:
            raise UsageError(f"unknown provider {self.provider!r}: use one of {', '.join(PROVIDERS)}")
        if self.preset not in PRESETS:
            raise UsageError(f"unknown preset {self.preset!r}: use one of {', '.join(PRESETS)}")
        if self.budget_s is not None and not self.budget_s >= 0:
            raise UsageError(f"the budget must not be negative, got {self.budget_s}")
        check_threads(self.threads)
        if not self.cases:
            raise UsageError("there are no shapes to tune for")
        if self.provider != "cuda" and (self.targets or self.cuda_graph):
            raise UsageError(f"{'a target' if self.targets else 'a CUDA graph'} to time needs the provider cuda")
        # What these may be is the converter's to say.
        self.conversion()

    def conversion(self, decisions: Decisions | None = None, targets: tuple[str, ...] = ()) -> ConvertOptions:
        """How a model is converted that these options are to tune.

        Args:
            decisions: what is to become sparse.
            targets: what to make images for.
        """
        return ConvertOptions(
            decisions=decisions,
            targets=targets,
            batches=tuple({case.batch: None for case in self.cases if case.batch}) if targets else (),
            nvrtc=self.nvrtc,
            jobs=self.jobs,
            cache_dir=self.cache_dir,
            precision=self.precision,
            fp16_io=self.fp16_io,
            keep_float=self.keep_float,
            fuse_pools=self.provider == "cuda",
        )

    @property
    def plan(self) -> Preset:
        """The preset itself."""
        return PRESETS[self.preset]
