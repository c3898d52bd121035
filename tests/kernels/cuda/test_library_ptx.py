"""The PTX that the native library carries, and what the assembler makes of its source."""

from __future__ import annotations

import re

import pytest

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels import library_ptx, nvrtc
from onnx_sparseconv.kernels.device_sources import (
    EARLY_KERNELS,
    LIBRARY_KERNELS,
    TENSOR_FLOAT_KERNELS,
    TENSOR_KERNELS,
    WGMMA_FLOAT_KERNELS,
    WGMMA_KERNELS,
)
from onnx_sparseconv.kernels.library_ptx import library_program, make_ptx, ptx_path

FOR_EVERY_GPU = (
    {f"sparseconv_csr_{t}_b{b}" for t in ("f32", "f16") for b in (1, 2, 4, 8)}
    | {f"sparseconv_{kernel}_{t}" for kernel in ("reduce", "pixel", "max_pool") for t in ("f32", "f16")}
    | {f"sparseconv_concatenate_v{bytes}" for bytes in (16, 4, 2)}
    | {
        f"sparseconv_depthwise_{window}_{t}"
        for window in ("3x3", "5x5", "7x7", "3x3s2", "5x5s2", "any")
        for t in ("f32", "f16")
    }
    | {
        f"sparseconv_max_pool_{window}_{vector}"
        for window in ("2x2", "3x3")
        for vector in ("f32", "f32_v8", "f32_v16", "f16", "f16_v4", "f16_v8", "f16_v16")
    }
)
KERNELS = {
    LIBRARY_KERNELS: FOR_EVERY_GPU,
    EARLY_KERNELS: FOR_EVERY_GPU,
    TENSOR_KERNELS: {f"sparseconv_tensor_{plan}" for plan in ("r4_p7", "r4_p8", "r2_p14", "r2_p16")}
    | {"sparseconv_reduce_vectors"},
    TENSOR_FLOAT_KERNELS: {f"sparseconv_tensor_f32_{plan}" for plan in ("r4_p7", "r4_p8", "r2_p14", "r2_p16")}
    | {"sparseconv_reduce_rounded"},
    WGMMA_KERNELS: {f"sparseconv_wgmma_p{n}" for n in (16, 24, 28, 30, 32)}
    | {f"sparseconv_ring_p{n}" for n in (8, 16, 32)}
    | {f"sparseconv_octets_n{n}" for n in (8, 15, 28, 29)}
    | {f"sparseconv_words_n{n}" for n in (8, 15)}
    | {f"sparseconv_cluster_n{n}" for n in (8, 15, 19, 29)}
    | {f"sparseconv_pointwise_s{n}" for n in (16, 24, 32)}
    | {"sparseconv_interleave", "sparseconv_gather", "sparseconv_space_to_depth", "sparseconv_reduce_vectors"},
    WGMMA_FLOAT_KERNELS: {f"sparseconv_wgmma_f32_p{n}" for n in (16, 24, 28, 30, 32)}
    | {f"sparseconv_octets_f32_n{n}" for n in (8, 15, 28, 29)}
    | {f"sparseconv_words_f32_n{n}" for n in (8, 15)}
    | {f"sparseconv_cluster_f32_n{n}" for n in (8, 15, 19, 29)}
    | {f"sparseconv_pointwise_f32_s{n}" for n in (16, 24, 32)}
    | {
        "sparseconv_interleave_f32",
        "sparseconv_gather_f32",
        "sparseconv_space_to_depth_f32",
        "sparseconv_reduce_rounded",
    },
}
# Registers, bytes spilled and of static shared memory that a kernel may have. 256 threads of 80 registers: three blocks
# and more on every multiprocessor; 384 of 168: one.
LIMITS = {
    LIBRARY_KERNELS: (80, 32, 4096),
    EARLY_KERNELS: (80, 32, 4096),
    TENSOR_KERNELS: (168, 96, 0),
    TENSOR_FLOAT_KERNELS: (168, 128, 4096),
    WGMMA_KERNELS: (168, 96, 0),
    WGMMA_FLOAT_KERNELS: (168, 176, 4096),
}
COMPILERS = nvrtc.installed()
OLDEST = next((c for c in COMPILERS if c.version == library_ptx.NVRTC_VERSION), None)

pytestmark = pytest.mark.skipif(not COMPILERS, reason="needs NVRTC: pip install nvidia-cuda-nvrtc-cu12")
needs_nvrtc_12_1 = pytest.mark.skipif(OLDEST is None, reason="needs nvidia-cuda-nvrtc-cu12==12.1.105")


@pytest.mark.parametrize(("source", "architecture"), library_ptx.ARCHITECTURES.items())
def test_the_committed_text_is_for_old_drivers_and_gpus(source, architecture):
    text = ptx_path(source).read_text(encoding="ascii")
    version = "8.2" if architecture == "90a" else "8.1"
    assert f"\n.version {version}\n.target sm_{architecture}\n" in text
    assert set(re.findall(r"\.entry (\w+)\(", text)) == KERNELS[source]


@needs_nvrtc_12_1
def test_the_committed_text_is_what_comes_out(capsys):
    assert library_ptx.main(["--check", "--nvrtc", OLDEST.path]) == 0
    assert capsys.readouterr().out.count("up to date") == len(KERNELS)


def test_a_stale_text_is_found_and_made_again(monkeypatch, tmp_path, capsys):
    compiler = COMPILERS[0]
    stale = tmp_path / "tensor_kernels.ptx"
    stale.write_text("// old\n")
    committed = {source: ptx_path(source).read_bytes() for source in KERNELS}
    for source in KERNELS.keys() - {TENSOR_KERNELS}:
        (tmp_path / ptx_path(source).name).write_bytes(committed[source])
    monkeypatch.setattr(library_ptx, "FOLDER", tmp_path)
    monkeypatch.setattr(library_ptx, "make_ptx", lambda _, source: committed[source])
    assert library_ptx.main(["--check", "--nvrtc", compiler.path]) == 1
    assert "differs; make it again" in capsys.readouterr().out
    assert library_ptx.main(["--nvrtc", compiler.path]) == 0
    assert stale.read_bytes() == committed[TENSOR_KERNELS]


def test_another_version_of_nvrtc_is_refused(capsys):
    other = next((c for c in COMPILERS if c.version != library_ptx.NVRTC_VERSION), None)
    if other is None:
        pytest.skip("needs an NVRTC other than 12.1")
    with pytest.raises(CompileError, match=r"not NVRTC 12\.1: `pip install nvidia-cuda-nvrtc-cu12==12\.1\.105`"):
        make_ptx(other, LIBRARY_KERNELS)
    assert library_ptx.main(["--check", "--nvrtc", other.path]) == 2
    assert "not NVRTC 12.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "architecture"),
    [
        (source, a)
        for source in (LIBRARY_KERNELS, EARLY_KERNELS, TENSOR_KERNELS, TENSOR_FLOAT_KERNELS)
        for a in (75, 80, 86, 89, 90, 100, 120)
    ]
    + [(WGMMA_KERNELS, 90), (WGMMA_FLOAT_KERNELS, 90)],
)
def test_the_assembler_finds_registers_enough(source, architecture):
    oldest = library_ptx.ARCHITECTURES[source].removesuffix("a")
    is_alone = library_ptx.ARCHITECTURES[source] != oldest
    if architecture < int(oldest):
        pytest.skip(f"{source} is not for sm_{architecture}")
    # NVRTC 12.1 does not assemble wgmma.mma_async.sp, it only writes it.
    able = [c for c in COMPILERS if architecture in c.supported_architectures() and (c != OLDEST or not is_alone)]
    if not able:
        pytest.skip(f"needs an NVRTC that knows sm_{architecture}" + (", from 12.2 on" if is_alone else ""))
    compiler = able[architecture // 5 % len(able)]  # each has some of the architectures
    target = f"sm_{architecture}a" if is_alone else f"sm_{architecture}"
    log = compiler.compile(library_program(source, target, "--ptxas-options=-v")).log
    assert "serialized" not in log  # products of warpgroups, which then wait for each other
    used = {}
    for part in log.split("Compiling entry function")[1:]:
        name = re.match(r" '(\w+)'", part)[1]
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        spilled = int(re.search(r"(\d+) bytes spill stores", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        used[name] = registers, spilled, int(shared[1]) if shared else 0
    assert used.keys() == KERNELS[source]
    for name, found in used.items():
        kinds = ("registers", "bytes spilled", "bytes of shared memory")
        for kind, number, limit in zip(kinds, found, LIMITS[source], strict=True):
            assert number <= limit, f"{name}: {number} {kind}"
