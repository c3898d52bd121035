"""The PTX of the kernels that the native library carries.

``python -m onnx_sparseconv.kernels.library_ptx`` writes it into a source checkout, ``--check`` compares. The texts are
what NVRTC 12.1 makes of the sources in ``kernels/cuda``, but for one comment on top: every driver from CUDA 12.1 on
understands PTX of that version, and always the same version makes the text reproducible.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from onnx_sparseconv.errors import CompileError, SparseConvError
from onnx_sparseconv.files import atomic_write
from onnx_sparseconv.kernels.device_sources import (
    EARLY_KERNELS,
    LANGUAGE_OPTIONS,
    LIBRARY_KERNELS,
    TENSOR_FLOAT_KERNELS,
    TENSOR_KERNELS,
    WGMMA_FLOAT_KERNELS,
    WGMMA_KERNELS,
    read_device_sources,
)
from onnx_sparseconv.kernels.nvrtc import Nvrtc, Program, find

NVRTC_VERSION = (12, 1)
# The oldest architecture that the kernels of a source run on; the driver translates for newer ones, but for 90a.
ARCHITECTURES = {
    LIBRARY_KERNELS: "75",
    EARLY_KERNELS: "90",
    TENSOR_KERNELS: "80",
    TENSOR_FLOAT_KERNELS: "80",
    WGMMA_KERNELS: "90a",
    WGMMA_FLOAT_KERNELS: "90a",
}
# PTX that NVRTC passes on as it stands in the source may be newer than what it writes by itself:
# wgmma.mma_async.sp is of this version, which drivers from CUDA 12.2 on understand.
_WRITTEN_VERSION, _WGMMA_VERSION = b"\n.version 8.1\n", b"\n.version 8.2\n"
FOLDER = Path(__file__).parents[1] / "custom_ops/native/cuda"
_COMMENT = b"// Made by onnx_sparseconv/kernels/library_ptx.py from onnx_sparseconv/kernels/cuda. Do not edit.\n"


def ptx_path(source: str) -> Path:
    """The committed PTX of a source, in a source checkout."""
    return FOLDER / Path(source).with_suffix(".ptx").name


def library_program(source: str, architecture: str, *options: str) -> Program:
    """What to compile for an architecture, ``compute_75`` (to PTX) or ``sm_90`` (to a cubin)."""
    sources = read_device_sources()
    return Program(
        source=sources[source],
        name=source,
        headers={name: text for name, text in sources.items() if not name.endswith(".cu")},
        options=(f"--gpu-architecture={architecture}", *LANGUAGE_OPTIONS, *options),
    )


def make_ptx(nvrtc: Nvrtc, source: str) -> bytes:
    """The text of a source's file.

    Raises:
        CompileError: the sources do not compile without a remark, or ``nvrtc`` is of another version.
    """
    if nvrtc.version != NVRTC_VERSION:
        wanted = "NVRTC {}.{}".format(*NVRTC_VERSION)
        raise CompileError(
            f"{nvrtc.path} is {nvrtc.name}, not {wanted}: `pip install nvidia-cuda-nvrtc-cu12==12.1.105`"
        )
    compiled = nvrtc.compile(library_program(source, f"compute_{ARCHITECTURES[source]}"))
    if compiled.log:
        raise CompileError(f"{nvrtc.name} has remarks on {source}: {compiled.log}", compiled.log)
    if ARCHITECTURES[source] == "90a":
        return _COMMENT + compiled.ptx.replace(_WRITTEN_VERSION, _WGMMA_VERSION)
    return _COMMENT + compiled.ptx


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the files. Returns the exit code: 1 where the check fails, 2 where nothing can be made."""
    parser = argparse.ArgumentParser(description="Make the PTX of the library's kernels.")
    parser.add_argument("--check", action="store_true", help="only compare the committed files")
    parser.add_argument("--nvrtc", type=Path, help="NVRTC 12.1's library file, where pip has another version")
    options = parser.parse_args(arguments)
    try:
        nvrtc = find(path=options.nvrtc) if options.nvrtc else find(NVRTC_VERSION[0])
        texts = {ptx_path(source): make_ptx(nvrtc, source) for source in ARCHITECTURES}
        if options.check:
            same = {path: path.is_file() and path.read_bytes() == ptx for path, ptx in texts.items()}
            for path, is_same in same.items():
                sys.stdout.write(f"{path}: {'up to date' if is_same else 'differs; make it again'}\n")
            return 0 if all(same.values()) else 1
        for path, ptx in texts.items():
            with atomic_write(path) as temporary:
                temporary.write_bytes(ptx)
            sys.stdout.write(f"{path}: {len(ptx)} bytes\n")
    except SparseConvError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
