"""ptxas, NVIDIA's assembler of PTX: the program that a pip wheel brings.

It needs neither a GPU nor a driver. A driver has an assembler of its own, as old or new as the driver is, for PTX that
it is given.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_sparseconv.errors import CompileError
from onnx_sparseconv.kernels.nvidia_wheels import wheel_files

# pip wheels by CUDA's major version.
WHEELS: Mapping[int, str] = {12: "nvidia-cuda-nvcc-cu12", 13: "nvidia-cuda-nvcc"}


@dataclass(frozen=True)
class Assembled:
    """What ptxas made.

    Attributes:
        cubin: code for one architecture.
        log: registers and the like of each kernel, and remarks.
    """

    cubin: bytes
    log: str


@dataclass(frozen=True)
class Ptxas:
    """An installed ptxas.

    Attributes:
        path: the program.
        version: in full, for example ``12.9.86``.
    """

    path: Path
    version: str

    @property
    def name(self) -> str:
        """``ptxas 12.9.86``."""
        return f"ptxas {self.version}"

    def assemble(self, ptx: bytes, architecture: str) -> Assembled:
        """Code of a text for an architecture such as ``sm_90a``.

        Raises:
            CompileError: ptxas refuses the text, or fails; carries its log.
        """
        with tempfile.TemporaryDirectory() as folder:
            text, cubin = Path(folder, "text.ptx"), Path(folder, "code.cubin")
            text.write_bytes(ptx)
            command: list[str | Path] = [self.path, f"-arch={architecture}", "--verbose", text, "-o", cubin]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            log = done.stdout + done.stderr
            if done.returncode:
                reason = next((line for line in log.splitlines() if "fatal" in line or "error" in line), "no reason")
                what = f"{self.name} failed for {architecture} (exit code {done.returncode}): {reason}"
                raise CompileError(what, log)
            return Assembled(cubin.read_bytes(), log)


def load(path: Path) -> Ptxas:
    """The ptxas of a file.

    Raises:
        CompileError: it is none, or does not run.
    """
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise CompileError(f"{path} does not work as ptxas: {error}") from error
    version = re.search(r"\bV(\d+\.\d+\.\d+)", told)
    if version is None:
        raise CompileError(f"{path} does not work as ptxas: it tells no version")
    return Ptxas(path, version[1])


def find(major: int) -> Ptxas:
    """The ptxas of an installed wheel for CUDA 12 or 13.

    Raises:
        CompileError: there is none, or it does not run.
    """
    file = next(wheel_files(WHEELS[major], "ptxas"), None)
    if file is None:
        raise CompileError(f"there is no ptxas of CUDA {major} here: `pip install {WHEELS[major]}`")
    return load(file)
