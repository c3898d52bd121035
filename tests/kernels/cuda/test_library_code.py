"""The GPU code that the native library carries, and what assemblers make of its PTX."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace

import pytest

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels import library_code, nvrtc, ptxas
from onnx_sparseconv.kernels.device_sources import (
    EARLY_KERNELS,
    GEMM_FLOAT_KERNELS,
    GEMM_KERNELS,
    LIBRARY_KERNELS,
    SEGMENT_FLOAT_KERNELS,
    SEGMENT_KERNELS,
    TENSOR_FLOAT_KERNELS,
    TENSOR_KERNELS,
    WGMMA_FLOAT_KERNELS,
    WGMMA_KERNELS,
)
from onnx_sparseconv.kernels.library_code import ARCHITECTURES, Tools, code_path, is_cubin, make_code
from onnx_sparseconv.kernels.ptxas import Ptxas
from tests.support.gpu_code import with_ordered_metadata

FOR_EVERY_GPU = (
    {f"sparseconv_csr_{t}_b{b}" for t in ("f32", "f16") for b in (1, 2, 4, 8)}
    | {f"sparseconv_{kernel}_{t}" for kernel in ("reduce", "pixel", "max_pool") for t in ("f32", "f16")}
    | {f"sparseconv_concatenate_v{bytes}" for bytes in (16, 4, 2)}
    | {
        f"sparseconv_depthwise_{window}_{t}"
        for window in ("3x3", "5x5", "7x7", "3x3s2", "5x5s2", "1x1", "any")
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
    SEGMENT_KERNELS: {f"sparseconv_segments_r{n}" for n in (2, 4)},
    SEGMENT_FLOAT_KERNELS: {f"sparseconv_segments_f32_r{n}" for n in (2, 4)},
    WGMMA_KERNELS: {f"sparseconv_wgmma_p{n}" for n in (16, 24, 28, 30, 32)}
    | {f"sparseconv_ring_p{n}" for n in (8, 16, 32)}
    | {f"sparseconv_octets_n{n}" for n in (8, 15, 28, 29)}
    | {f"sparseconv_{form}_n{n}" for form in ("words", "strided") for n in (8, 15)}
    | {f"sparseconv_flat_{products}n{n}" for products in ("", "dense_") for n in (16, 24, 28, 30, 32)}
    | {f"sparseconv_cluster_n{n}" for n in (8, 15, 19, 29)}
    | {f"sparseconv_pointwise_s{n}" for n in (16, 24, 32)}
    | {
        "sparseconv_interleave",
        "sparseconv_flatten",
        "sparseconv_flatten_rows",
        "sparseconv_gather",
        "sparseconv_gather_whole",
        "sparseconv_gather_columns",
        "sparseconv_space_to_depth",
        "sparseconv_reduce_vectors",
    },
    WGMMA_FLOAT_KERNELS: {f"sparseconv_wgmma_f32_p{n}" for n in (16, 24, 28, 30, 32)}
    | {f"sparseconv_octets_f32_n{n}" for n in (8, 15, 28, 29)}
    | {f"sparseconv_{form}_f32_n{n}" for form in ("words", "strided") for n in (8, 15)}
    | {f"sparseconv_flat_{products}f32_n{n}" for products in ("", "dense_") for n in (16, 24, 28, 30, 32)}
    | {f"sparseconv_cluster_f32_n{n}" for n in (8, 15, 19, 29)}
    | {f"sparseconv_pointwise_f32_s{n}" for n in (16, 24, 32)}
    | {
        "sparseconv_interleave_f32",
        "sparseconv_flatten_f32",
        "sparseconv_flatten_rows_f32",
        "sparseconv_gather_f32",
        "sparseconv_gather_whole_f32",
        "sparseconv_gather_columns_f32",
        "sparseconv_space_to_depth_f32",
        "sparseconv_reduce_rounded",
    },
    GEMM_KERNELS: {f"sparseconv_gemm_boxes_s{n}" for n in (16, 32)}
    | {f"sparseconv_gemm_{way}_s{n}" for way in ("planes", "ready_planes") for n in (16, 25, 32)}
    | {"sparseconv_pack"},
    GEMM_FLOAT_KERNELS: {f"sparseconv_gemm_{way}_f32_s{n}" for way in ("boxes", "planes") for n in (8, 13, 14)}
    | {f"sparseconv_gemm_ready_boxes_f32_s{n}" for n in (13, 14)}
    | {"sparseconv_gemm_ready_planes_f32_s14", "sparseconv_pack_f32"},
}
# Registers, bytes spilled and of static shared memory that a kernel may have. 256 threads of 80 registers: three blocks
# and more on every multiprocessor, of 128 two; 384 of 168: one.
LIMITS = {
    LIBRARY_KERNELS: (80, 32, 4096),
    EARLY_KERNELS: (80, 32, 4096),
    TENSOR_KERNELS: (168, 64, 0),
    TENSOR_FLOAT_KERNELS: (168, 80, 4096),
    SEGMENT_KERNELS: (128, 32, 0),
    SEGMENT_FLOAT_KERNELS: (128, 64, 0),
    WGMMA_KERNELS: (168, 96, 4160),
    WGMMA_FLOAT_KERNELS: (168, 176, 4160),
    GEMM_KERNELS: (168, 256, 9216),
    GEMM_FLOAT_KERNELS: (168, 0, 9216),
}
OLDEST_NVRTC = next((c for c in nvrtc.installed() if c.version == library_code.NVRTC_VERSION), None)


def installed_assemblers() -> list[Ptxas]:
    found = []
    for major in ptxas.WHEELS:
        with contextlib.suppress(CompileError):
            found.append(ptxas.find(major))
    return found


ASSEMBLERS = installed_assemblers()
RIGHT_PTXAS = next((a for a in ASSEMBLERS if a.version == library_code.PTXAS_VERSION), None)
needs_tools = pytest.mark.skipif(
    OLDEST_NVRTC is None or RIGHT_PTXAS is None,
    reason="needs nvidia-cuda-nvrtc-cu12==12.1.105 and nvidia-cuda-nvcc-cu12==12.9.86",
)
needs_an_assembler = pytest.mark.skipif(not ASSEMBLERS, reason="needs ptxas: pip install nvidia-cuda-nvcc-cu12")
CUBINS = [source for source in ARCHITECTURES if is_cubin(source)]
TEXTS = [source for source in ARCHITECTURES if not is_cubin(source)]


def check_limits(source, log):
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


@pytest.mark.parametrize("source", TEXTS)
def test_the_committed_text_is_for_old_drivers_and_gpus(source):
    text = code_path(source).read_text(encoding="ascii")
    assert f"\n.version 8.1\n.target sm_{ARCHITECTURES[source]}\n" in text
    assert set(re.findall(r"\.entry (\w+)\(", text)) == KERNELS[source]


@pytest.mark.parametrize("source", CUBINS)
def test_the_committed_cubin_is_for_its_gpu(source):
    """ABI 7 is that of CUDA 12; drivers of CUDA 12 do not load code of a later one."""
    code = code_path(source).read_bytes()
    identification, machine, flags = code[:16], int.from_bytes(code[18:20], "little"), code[48:52]
    assert (identification[:4], identification[8], machine) == (b"\x7fELF", 7, 190)
    assert flags[0] == int(ARCHITECTURES[source].removesuffix("a"))
    assert {name.decode() for name in re.findall(rb"\0\.text\.(sparseconv_\w+)", code)} == KERNELS[source]


def test_no_other_code_is_committed():
    committed = {path for suffix in ("ptx", "cubin") for path in library_code.FOLDER.glob(f"*.{suffix}")}
    assert committed == {code_path(source) for source in ARCHITECTURES}


@needs_tools
@pytest.mark.parametrize("source", ARCHITECTURES)
def test_the_committed_code_is_what_comes_out(source):
    code, log = make_code(Tools(OLDEST_NVRTC, RIGHT_PTXAS), source)
    assert code_path(source).read_bytes() == code
    if is_cubin(source):
        check_limits(source, log)


@needs_tools
def test_stale_code_is_found_and_made_again(monkeypatch, tmp_path, capsys):
    stale = tmp_path / "tensor_kernels.ptx"
    stale.write_text("// old\n")
    committed = {source: code_path(source).read_bytes() for source in KERNELS}
    for source in KERNELS.keys() - {TENSOR_KERNELS}:
        (tmp_path / code_path(source).name).write_bytes(committed[source])
    monkeypatch.setattr(library_code, "FOLDER", tmp_path)
    monkeypatch.setattr(library_code, "make_code", lambda _, source: (committed[source], ""))
    tools = ["--nvrtc", OLDEST_NVRTC.path, "--ptxas", str(RIGHT_PTXAS.path)]
    assert library_code.main(["--check", *tools]) == 1
    said = capsys.readouterr().out
    assert said.count("differs; make it again") == 1
    assert said.count("up to date") == len(KERNELS) - 1
    assert library_code.main(tools) == 0
    assert stale.read_bytes() == committed[TENSOR_KERNELS]


@needs_tools
def test_other_versions_are_refused(tmp_path, capsys):
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    tool.chmod(0o755)
    with pytest.raises(CompileError, match=r"not ptxas 12\.9\.86: `pip install nvidia-cuda-nvcc-cu12==12\.9\.86`"):
        make_code(Tools(OLDEST_NVRTC, ptxas.load(tool)), LIBRARY_KERNELS)
    assert library_code.main(["--check", "--nvrtc", OLDEST_NVRTC.path, "--ptxas", str(tool)]) == 2
    assert "not ptxas 12.9.86" in capsys.readouterr().err
    newer = SimpleNamespace(version=(12, 9), name="NVRTC 12.9", path="libnvrtc.so")
    with pytest.raises(CompileError, match=r"not NVRTC 12\.1: `pip install nvidia-cuda-nvrtc-cu12==12\.1\.105`"):
        make_code(Tools(newer, RIGHT_PTXAS), LIBRARY_KERNELS)


def test_what_is_no_assembler_is_refused(tmp_path, capsys):
    with pytest.raises(CompileError, match=r"no_ptxas does not work as ptxas: .*No such file"):
        ptxas.load(tmp_path / "no_ptxas")
    assert library_code.main(["--check", "--ptxas", "/bin/true"]) == 2
    assert "does not work as ptxas: it tells no version" in capsys.readouterr().err


@needs_an_assembler
def test_what_the_assembler_refuses_is_told():
    with pytest.raises(CompileError, match=r"^ptxas [\d.]+ failed for sm_80 \(exit code \d+\): .*fatal") as caught:
        ASSEMBLERS[0].assemble(b"no PTX", "sm_80")
    assert caught.value.log


@needs_an_assembler
@pytest.mark.parametrize(
    ("assembler", "architecture"),
    # Each has some of the architectures.
    [
        (each, sm)
        for each in ASSEMBLERS
        for sm in ((86, 89) if each.version.startswith("13.") else (75, 80, 90, 100, 120))
    ],
    ids=lambda value: value if isinstance(value, int) else value.name.replace(" ", "-"),
)
@pytest.mark.parametrize("source", TEXTS)
def test_the_assembler_finds_registers_enough(source, assembler, architecture):
    if architecture < int(ARCHITECTURES[source]):
        pytest.skip(f"{source} is not for sm_{architecture}")
    text = code_path(source).read_bytes()
    assembled = assembler.assemble(with_ordered_metadata(text) if architecture >= 100 else text, f"sm_{architecture}")
    check_limits(source, assembled.log)
    assert b"hmma_mdata" not in assembled.cubin  # the function that puts metadata in order, before each product


@needs_an_assembler
def test_metadata_without_order_would_cost_a_call():
    """Which is why the text is another one there."""
    text = code_path(TENSOR_KERNELS).read_bytes()
    assert b"hmma_mdata" in ASSEMBLERS[-1].assemble(text, "sm_120").cubin
