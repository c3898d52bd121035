"""What can be said of a layer's speed before anything is timed."""

from __future__ import annotations

from onnx_sparseconv.converter.conv_sites import ConvSite

# At half of the weights zero, the best of all measured layers with one group gains so much (docs/cpu-kernel.md, "When
# it pays"). A sparse layer's time can at most be proportional to the weights that are left.
BEST_SPEEDUP_AT_HALF = 1.71


def speedup_bound(sparsity: float) -> float:
    """The most that a sparse layer of one group can gain over a dense one, by what was measured."""
    return BEST_SPEEDUP_AT_HALF * 0.5 / max(1 - sparsity, 1e-9)


def why_hopeless(site: ConvSite, sparsity: float) -> str:
    """Why a layer need not be timed; empty where it may win.

    Layers with several groups always may: dense kernels for them are far from the machine's peak.
    """
    if site.geometry is None or site.geometry.group != 1 or speedup_bound(sparsity) >= 1:
        return ""
    return (
        f"not timed: {sparsity:.1%} of its weights are zero, and even the best layer known would run at "
        f"{speedup_bound(sparsity):.2f}x the speed of dense"
    )
