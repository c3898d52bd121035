"""Compiling images with the real NVRTC: of tiny kernels, and of one that the generator makes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnx_sparseconv.errors import CompileError, UsageError
from onnx_sparseconv.kernels import compile as compile_module
from onnx_sparseconv.kernels import fatbin, nvjitlink, nvrtc, targets
from onnx_sparseconv.kernels.compile import CompileOptions, StraightLineCode, Task, compile_layers, make_image
from onnx_sparseconv.kernels.cuda_driver import CudaDriver, Gpu
from onnx_sparseconv.kernels.image_container import pack, parse
from onnx_sparseconv.kernels.layer import make_layer
from onnx_sparseconv.kernels.plan import GeneratedPlan
from onnx_sparseconv.kernels.targets import Target, resolve_targets
from tests.kernels.compile_tasks import TinyGenerator
from tests.support.gpu_images import (
    ELF,
    FAT_BINARY,
    cubin_bytes,
    make_plan,
    needs_nvfatbin,
    needs_nvjitlink,
    needs_nvrtc,
)


def layer(out_channels=8, density=0.3, seed=0):
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((out_channels, 4, 3, 3)) * (rng.random((out_channels, 4, 3, 3)) < density)).astype(
        "f"
    )
    geometry = {"strides": (1, 1), "dilations": (1, 1), "pads": (1, 1, 1, 1), "group": 1}
    return make_layer(weight, **geometry, element_type=weight.dtype, activation=0, in_size=(8, 8))


def compile_tiny(layers, names, folder, jobs=1, **keywords):
    options = CompileOptions(jobs, folder)
    return compile_layers(layers, resolve_targets(names), options, generator=TinyGenerator(), **keywords)


@needs_nvrtc
def test_images_are_in_the_order_of_layers_and_targets(tmp_path):
    layers = [("small", layer(4)), ("empty", layer(density=0)), ("large", layer(32))]
    seen = []
    found = compile_tiny(layers, ["sm_90", "sm_80"], tmp_path, 2, progress=lambda *step: seen.append(step))
    assert [[o.image and o.image.architecture for o in outcomes] for outcomes in found] == [
        [90, 80],
        [None, None],
        [90, 80],
    ]
    for outcome in (*found[0], *found[2]):
        assert cubin_bytes(outcome.image.code) > 0
        assert outcome.image.compiler.startswith("NVRTC ")
        assert outcome.image.min_driver in (12000, 12040, 13000)
        assert outcome.image.plan == make_plan(outcome.image.architecture)
        assert outcome.time_s > 0
        assert not outcome.cached
    assert {o.refusal for o in found[1]} == {"it has no weights"}
    assert seen[0] == (0, 6, "")
    assert [(done, total) for done, total, _ in seen] == [(n, 6) for n in range(7)]
    assert {what for _, _, what in seen[1:]} == {"small", "empty", "large"}
    images = [o.image for o in found[0]]
    assert list(parse(pack(images))) == images


@needs_nvrtc
def test_the_second_time_nothing_is_compiled(tmp_path, monkeypatch):
    layers = [("a", layer(4)), ("b", layer(8))]
    first = compile_tiny(layers, ["sm_90"], tmp_path / "cache")
    second = compile_tiny(layers, ["sm_90"], tmp_path / "cache")
    assert [o.cached for (o,) in second] == [True, True]
    assert [o.image for (o,) in second] == [o.image for (o,) in first]
    files = sorted((tmp_path / "cache").iterdir())
    assert len(files) == 2
    # Another architecture or a damaged file is compiled, the rest is not.
    files[0].write_bytes(b"damaged")
    third = compile_tiny(layers, ["sm_90", "sm_80"], tmp_path / "cache")
    assert sorted(o.cached for outcomes in third for o in outcomes) == [False, False, False, True]
    assert [outcomes[0].image for outcomes in third] == [o.image for (o,) in first]
    monkeypatch.setenv("ONNX_SPARSECONV_CACHE", str(tmp_path / "other"))
    assert not compile_tiny(layers[:1], ["sm_90"], None)[0][0].cached
    assert len(list((tmp_path / "other").iterdir())) == 1


@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_told_and_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    ((outcome,),) = compile_tiny([("a", layer())], ["sm_90"], tmp_path / "file" / "cache")
    assert outcome.image is not None
    assert "cannot be written" in outcome.cache_problem


@needs_nvrtc
@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        ("syntax", CompileError, r"layer 'conv1' for sm_90: NVRTC .* cannot compile"),
        ("crash", CompileError, r"layer 'conv1' for sm_90: its process died \(exit code 9\)"),
        ("bug", ZeroDivisionError, "oops"),
    ],
)
def test_a_failure_names_the_layer(tmp_path, failure, error, message):
    with pytest.raises(error, match=message) as caught:
        compile_layers(
            [("conv1", layer())],
            resolve_targets(["sm_90"]),
            CompileOptions(1, tmp_path),
            generator=TinyGenerator(failure),
        )
    assert "\n" not in str(caught.value)
    if failure == "syntax":
        assert "error" in caught.value.log


@needs_nvrtc
def test_the_generator_of_the_package_makes_images(tmp_path):
    for dtype in (np.float32, np.float16):
        made = layer()
        made = make_layer(
            made.weight,
            strides=(1, 1),
            dilations=(1, 1),
            pads=(1, 1, 1, 1),
            group=1,
            element_type=np.dtype(dtype),
            activation=1,
        )
        ((outcome,),) = compile_layers([("conv1", made)], resolve_targets(["sm_75"]), CompileOptions(1, tmp_path))
        assert cubin_bytes(outcome.image.code) > 16 * np.count_nonzero(made.weight)
        assert isinstance(outcome.image.plan, GeneratedPlan)


@needs_nvjitlink
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_tiles_of_long_code_are_compiled_apart_and_linked(tmp_path, monkeypatch, dtype):
    # Of larger maps, a kernel has two tiles, not the twenty that fill a GPU with a small one.
    made = dataclasses.replace(layer(80, density=0.2), in_size=(28, 28), element_type=np.dtype(dtype))

    def compile_once():
        wanted = (dataclasses.replace(t, nvfatbin=None) for t in resolve_targets(["sm_75", "sm_80", "sm_90"]))
        tasks = [Task("a", made, target, tmp_path, StraightLineCode()) for target in wanted]
        return [make_image(task).image for task in tasks]

    together = compile_once()
    monkeypatch.setattr(compile_module, "_LINKED_CODE_BYTES", 0)
    monkeypatch.setattr(compile_module, "_MAX_OPTIMISED_BYTES", 0)
    linked = compile_once()
    monkeypatch.setattr(nvjitlink, "find", lambda _version: None)
    unlinked = compile_once()
    for one, several, without in zip(together, linked, unlinked, strict=True):
        assert one.plan == several.plan == without.plan
        assert one.plan.num_tiles > 1
        for image in (one, several, without):
            assert image.code.startswith(ELF)
            assert b"sparseconv_generated" in image.code
        functions = [b"sparseconv_tile_%d" % tile in several.code for tile in range(one.plan.num_tiles + 1)]
        assert functions == [True] * one.plan.num_tiles + [False]
        assert not any(b"sparseconv_tile_0" in image.code for image in (one, without))
        assert one.code != without.code  # which is optimised less


@needs_nvfatbin
def test_images_are_compressed_where_that_can_be_done(tmp_path, monkeypatch):
    def compile_once():
        ((outcome,),) = compile_layers([("a", layer())], resolve_targets(["sm_90"]), CompileOptions(1, tmp_path))
        return outcome

    small = compile_once()
    monkeypatch.setattr(fatbin, "find", lambda _major: None)
    plain = compile_once()
    assert small.image.code.startswith(FAT_BINARY)
    assert plain.image.code.startswith(ELF)
    assert b"sparseconv_generated" in plain.image.code
    assert len(small.image.code) < cubin_bytes(small.image.code) / 2 == len(plain.image.code) / 2
    assert dataclasses.replace(small.image, code=b"", min_driver=0) == dataclasses.replace(
        plain.image, code=b"", min_driver=0
    )
    # Neither takes the other's place in the cache.
    assert (small.cached, plain.cached) == (False, False)
    assert compile_once().image == plain.image
    monkeypatch.undo()
    again = compile_once()
    assert (again.image, again.cached) == (small.image, True)
    assert list(parse(pack([again.image]))) == [again.image]


@needs_nvfatbin
def test_what_compresses_decides_which_drivers_load_an_image(monkeypatch):
    compilers = nvrtc.installed()
    for compiler in compilers:
        packed = Target(90, compiler, fatbin.find(compiler.version[0]))
        plain = Target(90, compiler)
        assert plain.min_driver == 1000 * compiler.version[0]
        assert plain.tools == compiler.name
        if packed.nvfatbin:
            assert packed.min_driver == {12: 12040, 13: 13000}[compiler.version[0]]
            assert packed.tools == f"{compiler.name}, {packed.nvfatbin.name}"
            assert packed.nvfatbin.version[0] == compiler.version[0]
    (target,) = resolve_targets(["sm_90"])
    assert target.nvfatbin is not None
    monkeypatch.setattr(fatbin, "find", lambda _major: None)
    assert resolve_targets(["sm_90"])[0].nvfatbin is None


def test_no_layers_start_nothing(tmp_path):
    assert compile_layers([], [], CompileOptions(1, tmp_path)) == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="jobs"):
        CompileOptions(jobs=0)


@needs_nvrtc
def test_targets_are_taken_once_and_in_order():
    assert [t.name for t in resolve_targets(["sm_90", "sm_80", "sm_90"])] == ["sm_90", "sm_80"]
    assert resolve_targets([]) == ()
    oldest = nvrtc.installed()[0]
    (target,) = resolve_targets(["sm_80"])
    assert target.nvrtc.version == oldest.version
    assert target.min_driver in (1000 * oldest.version[0], fatbin.MIN_DRIVER)
    for major in (n.version[0] for n in nvrtc.installed()):
        assert resolve_targets(["sm_80"], str(major))[0].nvrtc.version[0] == major


@needs_nvrtc
@pytest.mark.parametrize("name", ["90", "sm90", "sm_", "sm_90a", "compute_90", "sm_09", "", "sm_9", "sm_1000", "SM_90"])
def test_what_is_no_architecture_is_refused(name):
    with pytest.raises(UsageError, match=r"unknown target .* sm_90"):
        resolve_targets(["sm_80", name])


@needs_nvrtc
@pytest.mark.parametrize("name", ["sm_70", "sm_91", "sm_999"])
def test_an_architecture_that_no_compiler_knows_is_refused_with_those_that_it_knows(name):
    with pytest.raises(UsageError, match=rf"for {name}: NVRTC .* knows sm_75, sm_80, ") as caught:
        resolve_targets([name])
    assert "sm_70," not in str(caught.value).partition("knows")[2]
    with pytest.raises(UsageError, match="nvrtc must be"):
        resolve_targets(["sm_80"], "11")


@needs_nvrtc
@pytest.mark.parametrize(("name", "is_newer"), [("sm_70", False), ("sm_999", True)])
def test_where_a_newer_compiler_may_know_an_architecture_it_is_said(name, is_newer):
    with pytest.raises(UsageError, match="no compiler here") as caught:
        resolve_targets([name])
    assert ("A newer one may: `pip install -U nvidia-cuda-nvrtc" in str(caught.value)) == is_newer


def test_without_a_compiler_one_line_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(nvrtc, "_wheel_files", lambda _major: iter(()))

    def refuse(path):
        raise CompileError(f"{path}: no such file")

    monkeypatch.setattr(nvrtc, "Nvrtc", refuse)
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvrtc"):
        resolve_targets(["sm_80"])


@needs_nvrtc
def test_native_asks_the_driver(monkeypatch):
    gpus = tuple(Gpu(f"GPU {c}", c, 1) for c in ("9.0", "8.6", "9.0"))
    monkeypatch.setattr(targets, "read_cuda_driver", lambda: CudaDriver("580", "13.0", gpus, ""))
    assert [t.name for t in resolve_targets(["native", "sm_90", "sm_80"])] == ["sm_90", "sm_86", "sm_80"]


def test_native_without_a_gpu_is_one_line(monkeypatch):
    monkeypatch.setattr(targets, "read_cuda_driver", lambda: CudaDriver("", "", (), "no NVIDIA driver"))
    with pytest.raises(CompileError, match=r"native: no NVIDIA driver; name an architecture"):
        resolve_targets(["native"])


@needs_nvrtc
def test_several_programs_need_a_linker():
    target = Target(90, nvrtc.installed()[0])
    programs = [nvrtc.Program("__device__ int x;", options=("--gpu-architecture=sm_90",))] * 2
    with pytest.raises(CompileError, match=r"nothing links programs here: pip install 'nvidia-nvjitlink"):
        target.compile(programs)
