"""The GPU code of the kernels that the native library carries.

``python -m onnx_sparseconv.kernels.library_code`` writes it into a source checkout, ``--check`` compares. It begins
with what NVRTC 12.1 makes of the sources in ``kernels/cuda``, always the same version, so that it is reproducible:
every driver from CUDA 12.1 on understands PTX of that version.

Most of it stays PTX, which the driver assembles for its GPU. Kernels of warpgroups are for one architecture alone, so
one cubin does, and they cannot be left to the driver: assemblers up to 12.8 let products of warpgroups wait for each
other, and those up to 12.5 crash on some. ptxas 12.9 makes the cubins; every driver of CUDA 12 and later loads them,
and no session waits for an assembler.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx_sparseconv.errors import CompileError, SparseConvError
from onnx_sparseconv.files import atomic_write
from onnx_sparseconv.kernels import nvrtc, ptxas
from onnx_sparseconv.kernels.device_sources import (
    EARLY_KERNELS,
    GEMM_FLOAT_KERNELS,
    GEMM_KERNELS,
    LANGUAGE_OPTIONS,
    LIBRARY_KERNELS,
    SEGMENT_FLOAT_KERNELS,
    SEGMENT_KERNELS,
    TENSOR_FLOAT_KERNELS,
    TENSOR_KERNELS,
    WGMMA_FLOAT_KERNELS,
    WGMMA_KERNELS,
    read_device_sources,
)
from onnx_sparseconv.kernels.nvrtc import Nvrtc, Program
from onnx_sparseconv.kernels.ptxas import Ptxas

NVRTC_VERSION = (12, 1)
PTXAS_VERSION = "12.9.86"
# The oldest architecture that the kernels of a source run on; the driver translates for newer ones, but for 90a.
ARCHITECTURES = {
    LIBRARY_KERNELS: "75",
    EARLY_KERNELS: "90",
    TENSOR_KERNELS: "80",
    TENSOR_FLOAT_KERNELS: "80",
    SEGMENT_KERNELS: "80",
    SEGMENT_FLOAT_KERNELS: "80",
    WGMMA_KERNELS: "90a",
    WGMMA_FLOAT_KERNELS: "90a",
    GEMM_KERNELS: "90a",
    GEMM_FLOAT_KERNELS: "90a",
}
# PTX that NVRTC passes on as it stands in the source may be newer than what it writes by itself:
# wgmma.mma_async.sp is of this version.
_WRITTEN_VERSION, _WGMMA_VERSION = b"\n.version 8.1\n", b"\n.version 8.2\n"
# A comment with which NVRTC counts the calls of all that the process has compiled.
_CALL_NUMBER = re.compile(rb" // callseq \d+(, \d+)?$", re.MULTILINE)
FOLDER = Path(__file__).parents[1] / "custom_ops/native/cuda"
_COMMENT = b"// Made by onnx_sparseconv/kernels/library_code.py from onnx_sparseconv/kernels/cuda. Do not edit.\n"


@dataclass(frozen=True)
class Tools:
    """What makes the code: NVRTC 12.1 and ptxas 12.9.86."""

    nvrtc: Nvrtc
    ptxas: Ptxas

    def check(self) -> None:
        """Raises CompileError where one is of another version."""
        if self.nvrtc.version != NVRTC_VERSION:
            wanted = "NVRTC {}.{}".format(*NVRTC_VERSION)
            install = "`pip install nvidia-cuda-nvrtc-cu12==12.1.105`"
            raise CompileError(f"{self.nvrtc.path} is {self.nvrtc.name}, not {wanted}: {install}")
        if self.ptxas.version != PTXAS_VERSION:
            install = f"`pip install {ptxas.WHEELS[12]}=={PTXAS_VERSION}`"
            raise CompileError(f"{self.ptxas.path} is {self.ptxas.name}, not ptxas {PTXAS_VERSION}: {install}")


def is_cubin(source: str) -> bool:
    """Whether the library carries a source as a cubin; else it is PTX."""
    return ARCHITECTURES[source] == "90a"


def code_path(source: str) -> Path:
    """The committed code of a source, in a source checkout."""
    return FOLDER / Path(source).with_suffix(".cubin" if is_cubin(source) else ".ptx").name


def _program(source: str) -> Program:
    """What NVRTC makes PTX of."""
    sources = read_device_sources()
    return Program(
        source=sources[source],
        name=source,
        headers={name: text for name, text in sources.items() if not name.endswith(".cu")},
        options=(f"--gpu-architecture=compute_{ARCHITECTURES[source]}", *LANGUAGE_OPTIONS),
    )


def make_code(tools: Tools, source: str) -> tuple[bytes, str]:
    """What a source's file holds, and what ptxas tells of it, where it made it.

    Raises:
        CompileError: the sources do not compile without a remark, or a tool is of another version.
    """
    tools.check()
    compiled = tools.nvrtc.compile(_program(source))
    if compiled.log:
        raise CompileError(f"{tools.nvrtc.name} has remarks on {source}: {compiled.log}", compiled.log)
    ptx = _CALL_NUMBER.sub(b"", compiled.ptx)
    if not is_cubin(source):
        return _COMMENT + ptx, ""
    assembled = tools.ptxas.assemble(ptx.replace(_WRITTEN_VERSION, _WGMMA_VERSION), f"sm_{ARCHITECTURES[source]}")
    return assembled.cubin, assembled.log


def find_tools(nvrtc_path: Path | None = None, ptxas_path: Path | None = None) -> Tools:
    """Those of files, or else of pip wheels.

    Raises:
        CompileError: one is missing, or does not work.
    """
    return Tools(
        nvrtc.find(path=nvrtc_path) if nvrtc_path else nvrtc.find(NVRTC_VERSION[0]),
        ptxas.load(ptxas_path) if ptxas_path else ptxas.find(12),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the files. Returns the exit code: 1 where the check fails, 2 where nothing can be made."""
    parser = argparse.ArgumentParser(description="Make the GPU code of the library's kernels.")
    parser.add_argument("--check", action="store_true", help="only compare the committed files")
    parser.add_argument("--nvrtc", type=Path, help="NVRTC 12.1's library file, where pip has another version")
    parser.add_argument("--ptxas", type=Path, help="ptxas 12.9.86, where pip has another version")
    options = parser.parse_args(arguments)
    try:
        tools = find_tools(options.nvrtc, options.ptxas)
        files = {code_path(source): make_code(tools, source)[0] for source in ARCHITECTURES}
        if options.check:
            same = {path: path.is_file() and path.read_bytes() == code for path, code in files.items()}
            for path, is_same in same.items():
                sys.stdout.write(f"{path}: {'up to date' if is_same else 'differs; make it again'}\n")
            return 0 if all(same.values()) else 1
        for path, code in files.items():
            with atomic_write(path) as temporary:
                temporary.write_bytes(code)
            sys.stdout.write(f"{path}: {len(code)} bytes\n")
    except SparseConvError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
