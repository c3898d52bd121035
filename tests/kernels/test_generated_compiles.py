"""Generated kernels compile for every architecture, and sums stay in registers. No GPU is needed."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from onnx_sparseconv.kernels import compile as compile_module
from onnx_sparseconv.kernels import nvjitlink, nvrtc
from onnx_sparseconv.kernels.compile import StraightLineCode, image_programs
from onnx_sparseconv.kernels.layer import make_layer
from onnx_sparseconv.kernels.plan import choose_plan
from onnx_sparseconv.kernels.source import KERNEL_NAME
from onnx_sparseconv.kernels.targets import Target
from tests.support.sparse_models import random_weight

COMPILERS = [pytest.param(compiler, id=f"NVRTC-{compiler.version[0]}") for compiler in nvrtc.installed()]
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
# Of the instructions: a few values of what is done once a chunk or a group. Sums would be many more. The widest tiles
# of halves spill the most: with registers enough, a third of their warps would not fit, and they were no faster.
MAX_SPILL_SHARE = 0.05
INSTRUCTION_BYTES = 16
# Shape of the weight, stride, and channels of each input where there are several.
FORMS = {
    "3x3": ((64, 32, 3, 3), 1, ()),
    "1x1": ((64, 128, 1, 1), 1, ()),
    "1x1, three inputs": ((64, 128, 1, 1), 1, (40, 20, 68)),
    "5x5, stride 2": ((24, 16, 5, 5), 2, ()),
    "7x7, stride 2": ((32, 3, 7, 7), 2, ()),
}
LINKED_FORMS = {
    "3x3": ((80, 32, 3, 3), 1, ()),
    "1x1": ((160, 96, 1, 1), 1, ()),
    "1x1, three inputs": ((160, 96, 1, 1), 1, (32, 4, 60)),
}


def compile_layer(target, form, dtype, *, is_linked):
    shape, stride, source_channels = form
    pad = shape[2] // 2
    layer = make_layer(
        random_weight(shape, 0.1),
        strides=(stride, stride),
        dilations=(1, 1),
        pads=(pad,) * 4,
        group=1,
        element_type=np.dtype(dtype),
        activation=1,
        in_size=(56, 56),
        source_channels=source_channels,
    )
    plan = choose_plan(layer, target.architecture)
    programs = image_programs(StraightLineCode(), layer, plan, target)
    assert len(programs) == (plan.num_tiles + 1 if is_linked else 1)
    return target.compile([replace(p, options=(*p.options, "--ptxas-options=-v")) for p in programs])


@pytest.mark.skipif(not COMPILERS, reason="NVRTC is not installed")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_linked", [False, True], ids=["one program", "linked"])
def test_next_to_nothing_is_spilled(monkeypatch, compiler, architecture, dtype, is_linked):
    if is_linked:
        if not nvjitlink.find(compiler.version):
            pytest.skip(f"nvJitLink is not installed for {compiler.name}")
        monkeypatch.setattr(compile_module, "_LINKED_CODE_BYTES", 0)
    if architecture not in compiler.supported_architectures():
        pytest.skip(f"NVRTC {compiler.version} does not know sm_{architecture}")
    target = Target(architecture, compiler, nvjitlink=nvjitlink.find(compiler.version))
    forms = LINKED_FORMS if is_linked else FORMS
    forms = forms if architecture in (75, 90) else {"3x3": forms["3x3"]}
    for name, form in forms.items():
        compiled = compile_layer(target, form, dtype, is_linked=is_linked)
        assert KERNEL_NAME.encode() in compiled.cubin, name
        spilled = [int(n) / 4 for n in re.findall(r"(\d+) bytes spill", compiled.log)]
        assert spilled, compiled.log
        instructions = len(compiled.cubin) / INSTRUCTION_BYTES
        assert sum(spilled) <= MAX_SPILL_SHARE * instructions, f"{name}: {compiled.log}"
