"""A pytest plugin that runs GPU tests without a GPU: ``pytest -p tests.support.emulated_gpu tests/gpu``.

Sessions on CUDA run the native library's CUDA side on the stand-in for the driver (`cuda_emulation`), and images are
the generated sources compiled for the CPU. What needs ONNX Runtime's real CUDA provider is left out.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

from onnx_sparseconv.converter import conversion, gpu_images
from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.kernels import cuda_driver, nvrtc
from onnx_sparseconv.kernels.compile import Outcome, StraightLineCode
from onnx_sparseconv.kernels.cuda_driver import CudaDriver, Gpu
from onnx_sparseconv.kernels.image_container import Image
from onnx_sparseconv.kernels.kernel_choice import find_plan, sized
from onnx_sparseconv.kernels.layer import Refusal
from onnx_sparseconv.kernels.targets import Target
from onnx_sparseconv.runtime import binding
from onnx_sparseconv.runtime import session as session_module
from onnx_sparseconv.tuner import gpu_candidates, setting
from tests.support import cuda_emulation
from tests.support.cuda_host_build import build_host_image

NAME = "tests.support.emulated_gpu"
_ARCHITECTURE = 90
_GPU = Gpu("emulated", "9.0", 1 << 30)
# They start processes of their own, or need more than one GPU.
_NEEDS_MORE = ("test_sanitizer", "test_models", "test_every_gpu", "test_images_of_every_compiler")
_COMPILER = SimpleNamespace(name="g++", version=(12, 0))


def compile_for_the_cpu(layers, wanted, options, *, progress=None, generator=None, choices=()):
    """In the place of `kernels.compile.compile_layers`."""
    assert [target.architecture for target in wanted] == [_ARCHITECTURE]
    assert options is not None
    assert generator is None
    chosen = [choice.get(_ARCHITECTURE) for choice in choices] or [None] * len(layers)
    made = [(_outcome(layer, choice),) for (_, layer), choice in zip(layers, chosen, strict=True)]
    if progress:
        progress(len(made), len(made), "")
    return made


def _outcome(layer, choice):
    generator = StraightLineCode()
    layer = layer if choice is None else sized(layer, choice)
    plan = generator.choose_plan(layer, _ARCHITECTURE) if choice is None else find_plan(layer, _ARCHITECTURE, choice)
    if isinstance(plan, Refusal):
        return Outcome(None, plan.reason, 0.0)
    source = generator.make_source(layer, plan)
    code = build_host_image(source.text, source.headers).read_bytes()
    return Outcome(Image(_ARCHITECTURE, 12000, "g++", plan, code), "", 0.0)


def pytest_configure(config):  # noqa: ARG001
    """Before any test module is imported."""
    os.environ[library.LIBRARY_VARIABLE] = str(cuda_emulation.build_emulated_library())
    cuda_emulation.fake_driver().reset()
    session_module.PROVIDER_NAMES["cuda"] = session_module.PROVIDER_NAMES["cpu"]
    binding.DEVICE_TYPES["cuda"] = binding.DEVICE_TYPES["cpu"]
    gpu_images.compile_layers = compile_for_the_cpu
    cuda_driver.read_cuda_driver = lambda: CudaDriver("0", "13.0", (_GPU,), "")
    nvrtc.installed = lambda: (_COMPILER,)
    conversion.resolve_targets = lambda names, _: tuple(Target(_ARCHITECTURE, _COMPILER) for _ in names)
    gpu_candidates.resolve_targets = conversion.resolve_targets
    gpu_candidates.read_cuda_driver = setting.read_cuda_driver = cuda_driver.read_cuda_driver


def pytest_collection_modifyitems(config, items):
    kept = [item for item in items if not any(part in item.nodeid for part in _NEEDS_MORE)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
