"""The PTX that the native library carries, and what the assembler makes of its source."""

from __future__ import annotations

import re

import pytest

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels import library_ptx, nvrtc
from onnx_sparseconv.kernels.library_ptx import library_program, make_ptx

KERNELS = {f"sparseconv_csr_{t}_b{b}" for t in ("f32", "f16") for b in (1, 2, 4, 8)} | {
    f"sparseconv_reduce_{t}" for t in ("f32", "f16")
}
COMPILERS = nvrtc.installed()
OLDEST = next((c for c in COMPILERS if c.version == library_ptx.NVRTC_VERSION), None)

pytestmark = pytest.mark.skipif(not COMPILERS, reason="needs NVRTC: pip install nvidia-cuda-nvrtc-cu12")
needs_nvrtc_12_1 = pytest.mark.skipif(OLDEST is None, reason="needs nvidia-cuda-nvrtc-cu12==12.1.105")


def test_the_committed_text_is_for_old_drivers_and_gpus():
    text = library_ptx.PATH.read_text(encoding="ascii")
    assert "\n.version 8.1\n.target sm_75\n" in text
    assert set(re.findall(r"\.entry (\w+)\(", text)) == KERNELS


@needs_nvrtc_12_1
def test_the_committed_text_is_what_comes_out(capsys):
    assert library_ptx.main(["--check", "--nvrtc", OLDEST.path]) == 0
    assert "up to date" in capsys.readouterr().out


def test_a_stale_text_is_found_and_made_again(monkeypatch, tmp_path, capsys):
    compiler = COMPILERS[0]
    stale = tmp_path / "library_kernels.ptx"
    stale.write_text("// old\n")
    committed = library_ptx.PATH.read_bytes()
    monkeypatch.setattr(library_ptx, "PATH", stale)
    monkeypatch.setattr(library_ptx, "make_ptx", lambda _: committed)
    assert library_ptx.main(["--check", "--nvrtc", compiler.path]) == 1
    assert "differs; make it again" in capsys.readouterr().out
    assert library_ptx.main(["--nvrtc", compiler.path]) == 0
    assert stale.read_bytes() == committed


def test_another_version_of_nvrtc_is_refused(capsys):
    other = next((c for c in COMPILERS if c.version != library_ptx.NVRTC_VERSION), None)
    if other is None:
        pytest.skip("needs an NVRTC other than 12.1")
    with pytest.raises(CompileError, match=r"not NVRTC 12\.1: `pip install nvidia-cuda-nvrtc-cu12==12\.1\.105`"):
        make_ptx(other)
    assert library_ptx.main(["--check", "--nvrtc", other.path]) == 2
    assert "not NVRTC 12.1" in capsys.readouterr().err


@pytest.mark.parametrize("architecture", [75, 80, 86, 89, 90, 100, 120])
def test_the_assembler_finds_registers_enough(architecture):
    able = [c for c in COMPILERS if architecture in c.supported_architectures()]
    if not able:
        pytest.skip(f"needs an NVRTC that knows sm_{architecture}")
    compiler = able[architecture // 5 % len(able)]  # each has some of the architectures
    log = compiler.compile(library_program(f"sm_{architecture}", "--ptxas-options=-v")).log
    used = {}
    for part in log.split("Compiling entry function")[1:]:
        name = re.match(r" '(\w+)'", part)[1]
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        spilled = int(re.search(r"(\d+) bytes spill stores", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        used[name] = registers, spilled, int(shared[1]) if shared else 0
    assert used.keys() == KERNELS
    for name, (registers, spilled, shared) in used.items():
        # 256 threads of 64 registers: four blocks and more on every multiprocessor.
        assert registers <= 64, f"{name}: {registers} registers"
        assert spilled <= 8, f"{name}: {spilled} bytes spilled"
        assert shared <= 4096, f"{name}: {shared} bytes of shared memory"
