"""From layers to GPU images: many layers, for several architectures, in parallel processes, with a cache.

A layer that no plan fits gets no image and says why; a compiler that fails is an error, because it should not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from onnx_sparseconv.errors import CompileError, UsageError
from onnx_sparseconv.kernels import fatbin
from onnx_sparseconv.kernels import plan as plans
from onnx_sparseconv.kernels import source as sources
from onnx_sparseconv.kernels.device_sources import LANGUAGE_OPTIONS
from onnx_sparseconv.kernels.image_cache import ImageCache, cache_folder, cache_key
from onnx_sparseconv.kernels.image_container import Image
from onnx_sparseconv.kernels.kernel_choice import KernelChoice, find_plan, sized
from onnx_sparseconv.kernels.layer import Refusal, SparseLayer
from onnx_sparseconv.kernels.nvrtc import Program
from onnx_sparseconv.kernels.plan import GeneratedPlan
from onnx_sparseconv.kernels.source import SourceText
from onnx_sparseconv.kernels.targets import Target
from onnx_sparseconv.kernels.worker import WorkerDiedError, run_in_workers, usable_cores

# The assembler's time grows with the square of a program's length. So kernels whose tiles together have more code than
# this are compiled tile by tile and linked, ..
_LINKED_CODE_BYTES = 3 << 18
_LINKED_OPTIONS = ("--relocatable-device-code=true",)
# .. and programs with more code than this, for want of a linker or of tiles, are optimised less. They run slower.
_MAX_OPTIMISED_BYTES = 3 << 19
_LONG_OPTIONS = ("--ptxas-options=-O1",)

# Called with (done, to do, what was done last).
Progress = Callable[[int, int, str], None]


class Generator(Protocol):
    """What makes source text of a layer. Has to be picklable: it works in other processes."""

    def choose_plan(self, layer: SparseLayer, architecture: int) -> GeneratedPlan | Refusal:
        """The plan for a layer, or why there is none."""

    def make_source(self, layer: SparseLayer, plan: GeneratedPlan) -> SourceText:
        """The program of a plan."""

    def make_linked_source(self, layer: SparseLayer, plan: GeneratedPlan) -> SourceText:
        """The same as programs that are to be linked."""


class StraightLineCode:
    """The generator of this package."""

    def choose_plan(self, layer: SparseLayer, architecture: int) -> GeneratedPlan | Refusal:
        """As `plan.choose_plan`."""
        return plans.choose_plan(layer, architecture)

    def make_source(self, layer: SparseLayer, plan: GeneratedPlan) -> SourceText:
        """As `source.make_source`."""
        return sources.make_source(layer, plan)

    def make_linked_source(self, layer: SparseLayer, plan: GeneratedPlan) -> SourceText:
        """As `source.make_linked_source`."""
        return sources.make_linked_source(layer, plan)


@dataclass(frozen=True)
class CompileOptions:
    """How images are compiled.

    Attributes:
        jobs: processes at a time; None: as many as this process may use cores.
        cache_dir: folder of the cache; None: `image_cache.cache_folder` says where.
    """

    jobs: int | None = None
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(f"jobs must be at least 1, got {self.jobs}")


@dataclass(frozen=True)
class Task:
    """One image to make.

    Attributes:
        name: of the layer, for messages.
        layer: what it computes.
        target: what it is for.
        cache_folder: where compiled images are kept.
        generator: makes the source.
        choice: the kernel that somebody chose for it; None leaves it to the generator.
    """

    name: str
    layer: SparseLayer
    target: Target
    cache_folder: Path
    generator: Generator
    choice: KernelChoice | None = None

    def __str__(self) -> str:
        return f"layer {self.name!r} for {self.target.name}"


@dataclass(frozen=True)
class Outcome:
    """What became of one task.

    Attributes:
        image: None when there is no plan.
        refusal: why there is none; empty when there is one.
        time_s: seconds for plan, source and compilation, or for finding the image in the cache.
        cached: whether it came out of the cache.
        cache_problem: why it could not be stored there; empty when it was.
    """

    image: Image | None
    refusal: str
    time_s: float
    cached: bool = False
    cache_problem: str = ""


def compile_layers(
    layers: Sequence[tuple[str, SparseLayer]],
    targets: Sequence[Target],
    options: CompileOptions,
    *,
    progress: Progress | None = None,
    generator: Generator | None = None,
    choices: Sequence[Mapping[int, KernelChoice]] = (),
) -> list[tuple[Outcome, ...]]:
    """Make the images of some layers.

    Args:
        layers: name and layer; names are for messages.
        targets: what images are for.
        options: processes and cache.
        progress: called before the first image, and after each.
        generator: makes the source; None: `StraightLineCode`.
        choices: for each layer, by architecture, the kernel that somebody chose; empty: nobody did.

    Returns:
        For each layer its outcomes, in the order of the targets.

    Raises:
        CompileError: a compiler failed, or its process died; names the layer, carries the log.
    """
    folder = cache_folder(options.cache_dir)
    generator = generator or StraightLineCode()
    tasks = [
        Task(name, layer, target, folder, generator, chosen.get(target.architecture))
        for (name, layer), chosen in zip(layers, choices or [{}] * len(layers), strict=True)
        for target in targets
    ]
    # The longest first: else the last process works while the others wait.
    order = sorted(range(len(tasks)), key=lambda i: -np.count_nonzero(tasks[i].layer.weight))
    outcomes: dict[int, Outcome] = {}
    if progress:
        progress(0, len(tasks), "")
    try:
        with closing(run_in_workers(make_image, [tasks[i] for i in order], options.jobs or usable_cores())) as results:
            for position, outcome in results:
                outcomes[order[position]] = outcome
                if progress:
                    progress(len(outcomes), len(tasks), tasks[order[position]].name)
    except WorkerDiedError as error:
        raise CompileError(f"{error.item}: {error}; if memory ran out, fewer jobs need less of it") from error
    if any(outcome.image is not None and not outcome.cached for outcome in outcomes.values()):
        ImageCache(folder).trim()
    per_layer = len(targets)
    return [tuple(outcomes[i * per_layer + j] for j in range(per_layer)) for i in range(len(layers))]


def is_linked(plan: GeneratedPlan) -> bool:
    """Whether the tiles of a kernel are compiled apart, if there is a linker."""
    return plan.num_tiles > 1 and plan.num_tiles * plan.code_bytes > _LINKED_CODE_BYTES


def image_programs(generator: Generator, layer: SparseLayer, plan: GeneratedPlan, target: Target) -> list[Program]:
    """What the image of a plan is compiled of, and linked where there are several: the kernel's program, then tiles."""
    options: tuple[str, ...] = (f"--gpu-architecture={target.name}", *LANGUAGE_OPTIONS)
    if is_linked(plan) and target.nvjitlink is not None:
        source = generator.make_linked_source(layer, plan)
        options = (*options, *_LINKED_OPTIONS, f"--maxrregcount={plan.max_registers}")
    else:
        source = generator.make_source(layer, plan)
        is_long = plan.num_tiles * plan.code_bytes > _MAX_OPTIMISED_BYTES
        options = (*options, *(_LONG_OPTIONS if is_long else ()))
    texts = {"sparseconv_generated.cu": source.text}
    texts |= {f"sparseconv_tile_{index}.cu": text for index, text in enumerate(source.tiles)}
    return [Program(text, name, source.headers, options) for name, text in texts.items()]


def make_image(task: Task) -> Outcome:
    """Plan, generate and compile one image, or find it in the cache.

    Raises:
        CompileError: the compiler failed; names the layer.
    """
    started = time.perf_counter()
    layer, architecture, choice = task.layer, task.target.architecture, task.choice
    if choice is None:
        plan = task.generator.choose_plan(layer, architecture)
    else:
        layer = sized(layer, choice)
        plan = find_plan(layer, architecture, choice)
    if isinstance(plan, Refusal):
        return Outcome(None, plan.reason, time.perf_counter() - started)
    target, cache = task.target, ImageCache(task.cache_folder)
    programs = image_programs(task.generator, layer, plan, target)
    packing = fatbin.OPTIONS if target.nvfatbin else ()
    texts = [program.source for program in programs]
    options = (*programs[0].options, *packing)
    key = cache_key(texts, programs[0].headers, options, target.architecture, target.tools)
    code, problem = cache.get(key), ""
    cached = code is not None
    if code is None:
        try:
            code = target.make_image(programs)
        except CompileError as error:
            raise CompileError(f"{task}: {error}", error.log) from error
        problem = cache.put(key, code)
    min_batch = 0 if choice is None else choice.min_batch
    image = Image(target.architecture, target.min_driver, target.nvrtc.name, plan, code, min_batch)
    return Outcome(image, "", time.perf_counter() - started, cached, problem)
