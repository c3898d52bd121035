"""GPU architectures that images are compiled for, and the compiler of each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from onnx_sparseconv.errors import CompileError, UsageError
from onnx_sparseconv.kernels import fatbin, nvjitlink, nvrtc
from onnx_sparseconv.kernels.cuda_driver import read_cuda_driver
from onnx_sparseconv.kernels.fatbin import NvFatbin
from onnx_sparseconv.kernels.nvjitlink import NvJitLink
from onnx_sparseconv.kernels.nvrtc import Compiled, Nvrtc, Program
from onnx_sparseconv.kernels.plan import MIN_ARCHITECTURE

NvrtcChoice = Literal["auto", "12", "13"]
NVRTC_CHOICES: tuple[NvrtcChoice, ...] = ("auto", "12", "13")
# Stands for the architectures of this machine's GPUs.
NATIVE = "native"


@dataclass(frozen=True)
class Target:
    """An architecture and what compiles for it.

    Attributes:
        architecture: 90 for ``sm_90``.
        nvrtc: the compiler.
        nvfatbin: compresses what it makes; None leaves that as it is.
        nvjitlink: links programs that were compiled apart; None: there is no linker.
    """

    architecture: int
    nvrtc: Nvrtc
    nvfatbin: NvFatbin | None = None
    nvjitlink: NvJitLink | None = None

    @property
    def name(self) -> str:
        """``sm_90``."""
        return f"sm_{self.architecture}"

    @property
    def min_driver(self) -> int:
        """The oldest driver that its images load in, as cuDriverGetVersion counts.

        Drivers load what any compiler of their own major version made, but not all of them unpack it.
        """
        oldest = 1000 * self.nvrtc.version[0]
        return oldest if self.nvfatbin is None else max(oldest, fatbin.MIN_DRIVER)

    @property
    def tools(self) -> str:
        """What makes its images: ``NVRTC 12.9, nvFatbin 12.9, nvJitLink 12.9``."""
        return ", ".join(tool.name for tool in (self.nvrtc, self.nvfatbin, self.nvjitlink) if tool is not None)

    def compile(self, programs: Sequence[Program]) -> Compiled:
        """Compile, and link where there are several programs.

        Returns:
            One cubin and all logs; PTX of a single program only.

        Raises:
            CompileError: a program is wrong, they do not fit together, or there is no linker.
        """
        parts = [self.nvrtc.compile(program) for program in programs]
        if len(parts) == 1:
            return parts[0]
        if self.nvjitlink is None:
            raise CompileError(f"nothing links programs here: {nvjitlink.how_to_install(self.nvrtc.version)}")
        cubin = self.nvjitlink.link([part.cubin for part in parts], self.architecture)
        return Compiled(b"", cubin, "\n".join(part.log for part in parts))

    def make_image(self, programs: Sequence[Program]) -> bytes:
        """What `compile` makes, compressed where that can be done.

        Raises:
            CompileError: one of the tools failed.
        """
        cubin = self.compile(programs).cubin
        return cubin if self.nvfatbin is None else self.nvfatbin.compress(cubin, self.architecture)


def resolve_targets(names: Sequence[str], choice: NvrtcChoice = "auto") -> tuple[Target, ...]:
    """The targets of some names, each once, in the order of the names.

    Args:
        names: ``sm_80`` and its like; ``native`` asks the driver for this machine's GPUs.
        choice: major version of NVRTC; ``auto`` takes the oldest that knows the architecture, for its images load in
            older drivers too.

    Raises:
        UsageError: a name is no architecture, or one that no compiler knows.
        CompileError: there is no compiler, or no GPU for ``native``.
    """
    if choice not in NVRTC_CHOICES:
        raise UsageError(f"nvrtc must be one of {', '.join(NVRTC_CHOICES)}, got {choice!r}")
    if not names:
        return ()
    architectures = parse_architectures(names)
    compilers = nvrtc.installed() if choice == "auto" else (nvrtc.find(int(choice)),)
    if not compilers:
        nvrtc.find()  # raises, and says how to get one
    known = {compiler: known_architectures(compiler) for compiler in compilers}
    # Each with that of its own CUDA: it knows the same architectures, and the same drivers are to load what both make.
    compressors = {compiler: fatbin.find(compiler.version[0]) for compiler in compilers}
    linkers = {compiler: nvjitlink.find(compiler.version) for compiler in compilers}
    targets = []
    for architecture in architectures:
        compiler = next((c for c, supported in known.items() if architecture in supported), None)
        if compiler is None:
            raise UsageError(_nothing_makes(architecture, known))
        targets.append(Target(architecture, compiler, compressors[compiler], linkers[compiler]))
    return tuple(targets)


def _nothing_makes(architecture: int, known: Mapping[Nvrtc, Sequence[int]]) -> str:
    """That no compiler makes images for an architecture, and, where a newer one may, how to get it."""
    listed = "; ".join(f"{c.name} knows {', '.join(f'sm_{a}' for a in made)}" for c, made in known.items())
    text = f"no compiler here makes images for sm_{architecture}: {listed}"
    if architecture > max(max(made) for made in known.values()):
        text += ". A newer one may: " + " or ".join(f"`pip install -U {wheel}`" for wheel in nvrtc.WHEELS.values())
    return text


def known_architectures(compiler: Nvrtc) -> list[int]:
    """Architectures that a compiler can make images for, rising."""
    return [a for a in compiler.supported_architectures() if a >= MIN_ARCHITECTURE]


def parse_architectures(names: Sequence[str]) -> tuple[int, ...]:
    """The architectures of some names, each once, in the order of the names: 90 for ``sm_90``. Needs no compiler.

    Raises:
        UsageError: a name is no architecture.
        CompileError: there is no GPU for ``native``.
    """
    return tuple(dict.fromkeys(architecture for name in names for architecture in _architectures(name)))


def _architectures(name: str) -> list[int]:
    if name == NATIVE:
        return native_architectures()
    match = re.fullmatch(r"sm_([1-9]\d{1,2})", name)
    if not match:
        raise UsageError(f"unknown target {name!r}: give an architecture such as sm_90, or {NATIVE}")
    return [int(match[1])]


def native_architectures() -> list[int]:
    """Architectures of this machine's GPUs, each once.

    Raises:
        CompileError: there is no GPU.
    """
    driver = read_cuda_driver()
    if not driver.gpus:
        raise CompileError(f"target {NATIVE}: {driver.problem}; name an architecture instead, such as sm_90")
    return list(dict.fromkeys(int(gpu.compute_capability.replace(".", "")) for gpu in driver.gpus))
