"""Which kernel is to run a layer on one architecture, where somebody chose: the outcome of tuning, in a few numbers.

A choice outlives the plan that it was made of: the same layer in another model, or planned by another version, may have
other chunks or threads. So a choice finds the plan that is most like it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from onnx_sparseconv.kernels.layer import Refusal, SparseLayer
from onnx_sparseconv.kernels.plan import GeneratedPlan, candidate_plans, choose_plan, cost

KernelName = Literal["generated", "csr"]
KERNEL_NAMES: tuple[KernelName, ...] = get_args(KernelName)
# Why a layer for which the library's own kernels were chosen gets no image.
CSR_CHOSEN = "the library's own kernels were chosen, by measurement, by the rule or by hand"


@dataclass(frozen=True)
class KernelChoice:
    """The kernel of a layer on one architecture.

    Attributes:
        kernel: ``generated`` for code of the layer's own, ``csr`` for the kernels that the library carries.
        tile_channels, chunk_channels, threads: of the plan, as in `GeneratedPlan`; 0 for ``csr``.
        in_size: ``(height, width)`` of X that the plan was made for, for models that leave theirs open; None where it
            was made for none. A packed plan, of a small map, runs this size alone.
        min_batch: images in a call from which on the generated kernel runs; fewer run on the library's own. 0: always.
    """

    kernel: KernelName
    tile_channels: int = 0
    chunk_channels: int = 0
    threads: int = 0
    in_size: tuple[int, int] | None = None
    min_batch: int = 0

    def __str__(self) -> str:
        if self.kernel == "csr":
            return "csr"
        return f"generated {self.tile_channels}x{self.chunk_channels}x{self.threads}{from_batch(self.min_batch)}"


CSR = KernelChoice("csr")


def from_batch(min_batch: int) -> str:
    """What is said of a kernel that runs from so many images on; empty where it always does."""
    return f", from {min_batch} images on" if min_batch > 1 else ""


def choice_of(plan: GeneratedPlan, layer: SparseLayer) -> KernelChoice:
    """The choice of one of a layer's plans."""
    return KernelChoice("generated", plan.tile_channels, plan.chunk_channels, plan.threads, layer.in_size)


def ranked_plans(layer: SparseLayer, architecture: int) -> list[GeneratedPlan]:
    """All plans of a layer, the one that `cost` thinks best first; none where no plan can run it."""
    return sorted(candidate_plans(layer, architecture), key=lambda plan: cost(layer, plan))


def sized(layer: SparseLayer, choice: KernelChoice) -> SparseLayer:
    """The layer as plans for this choice see it: with the size that it was made for, where its own is open."""
    return replace(layer, in_size=choice.in_size) if layer.in_size is None else layer


def find_plan(layer: SparseLayer, architecture: int, choice: KernelChoice) -> GeneratedPlan | Refusal:
    """The plan of a layer that is most like the chosen one: the same, else one of as many channels in a tile.

    Args:
        layer: as `sized` gives it.
        architecture: 90 for sm_90.
        choice: what was chosen.

    Returns:
        The plan; where no plan has as many channels in a tile, what `choose_plan` takes, which may be a refusal. A
        refusal as well where the library's own kernels were chosen.
    """
    if choice.kernel == "csr":
        return Refusal(CSR_CHOSEN)
    alike = [p for p in ranked_plans(layer, architecture) if p.tile_channels == choice.tile_channels]
    if not alike:
        return choose_plan(layer, architecture)
    return min(alike, key=lambda p: (abs(p.chunk_channels - choice.chunk_channels), abs(p.threads - choice.threads)))
