"""Looking at an installation: what is there, what contradicts what, and what really works."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx_sparseconv.errors import SparseConvError
from onnx_sparseconv.kernels import fatbin, nvjitlink, nvrtc
from onnx_sparseconv.kernels.image_cache import ImageCache, cache_folder
from onnx_sparseconv.kernels.targets import known_architectures
from onnx_sparseconv.runtime.environment import Environment, distribution_version, read_environment
from onnx_sparseconv.runtime.provider_check import ProviderCheck, check_provider
from onnx_sparseconv.runtime.session import PROVIDERS
from onnx_sparseconv.version import __version__

_CUPY_PREFIX = "cupy-cuda"
# onnxruntime-gpu wheels are built for CUDA 13 from this version on, for CUDA 12 before.
_FIRST_CUDA13 = (1, 27)
_OLDEST_ONNXRUNTIME = (1, 20)
_GRAPHSURGEON_BREAKS_WITH_ONNX = (1, 20)
_LAST_BROKEN_GRAPHSURGEON = (0, 5, 8)


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with the installation.

    Attributes:
        conflict: packages that contradict each other, as opposed to something that is missing or broken.
        text: what is wrong.
        remedy: what to do.
    """

    conflict: bool
    text: str
    remedy: str


@dataclass(frozen=True)
class LibraryCheck:
    """The native library.

    Attributes:
        path: the file; None when it was not found.
        version: its version; None when it cannot be loaded.
        problem: why it does not work; empty when it does.
    """

    path: str | None
    version: str | None
    problem: str


@dataclass(frozen=True)
class CompilerCheck:
    """An NVRTC, which compiles GPU images at conversion.

    Attributes:
        name: with its version.
        path: the library.
        targets: what `convert --target` can be given with it.
        compressor: the nvFatbin that compresses its images, with its version; empty where there is none.
        linker: the nvJitLink that links the parts of long ones, with its version; empty where there is none.
    """

    name: str
    path: str
    targets: tuple[str, ...]
    compressor: str
    linker: str


@dataclass(frozen=True)
class CacheCheck:
    """The cache of compiled GPU images.

    Attributes:
        folder: where it is, or would be.
        images: how many it holds.
        size_bytes: of all of them.
    """

    folder: str
    images: int
    size_bytes: int


@dataclass(frozen=True)
class DoctorReport:
    """What `diagnose` found.

    Attributes:
        onnxruntime_distributions: installed distributions that provide ``onnxruntime``, with versions.
        cupy_distributions: the same for ``cupy``.
        library: the native library.
        providers: every provider that this package knows.
        problems: what is wrong, conflicts first.
        environment: hardware and versions.
        compilers: every NVRTC that is found; none is needed to run models.
        image_cache: compiled GPU images.
    """

    onnxruntime_distributions: Mapping[str, str]
    cupy_distributions: Mapping[str, str]
    library: LibraryCheck
    providers: tuple[ProviderCheck, ...]
    problems: tuple[Problem, ...]
    environment: Environment
    compilers: tuple[CompilerCheck, ...]
    image_cache: CacheCheck

    @property
    def has_conflict(self) -> bool:
        """Whether installed packages contradict each other."""
        return any(problem.conflict for problem in self.problems)

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def diagnose() -> DoctorReport:
    """Look at this installation. Never raises for what it finds."""
    runtimes, cupys = distributions_of("onnxruntime"), distributions_of("cupy")
    library = check_library()
    providers = tuple(check_provider(provider) for provider in PROVIDERS)
    problems = [
        *runtime_problems(runtimes),
        *cupy_problems(runtimes, cupys),
        *graphsurgeon_problems(distribution_version("onnx"), distribution_version("onnx-graphsurgeon")),
        *library_problems(library, __version__),
        *([] if library.problem else provider_problems(providers)),
    ]
    problems.sort(key=lambda problem: not problem.conflict)
    return DoctorReport(
        onnxruntime_distributions=runtimes,
        cupy_distributions=cupys,
        library=library,
        providers=providers,
        problems=tuple(problems),
        environment=read_environment(),
        compilers=check_compilers(),
        image_cache=check_image_cache(),
    )


def check_compilers() -> tuple[CompilerCheck, ...]:
    """Find NVRTC, and what links and compresses its images."""
    checks = []
    for found in nvrtc.installed():
        targets = tuple(f"sm_{a}" for a in known_architectures(found))
        tools = (fatbin.find(found.version[0]), nvjitlink.find(found.version))
        compressor, linker = (tool.name if tool else "" for tool in tools)
        checks.append(CompilerCheck(found.name, found.path, targets, compressor, linker))
    return tuple(checks)


def check_image_cache() -> CacheCheck:
    """Look at the cache of GPU images; makes no folder."""
    folder = cache_folder()
    size = ImageCache(folder).size()
    return CacheCheck(str(folder), size.entries, size.size_bytes)


def distributions_of(module: str) -> dict[str, str]:
    """Installed distributions that bring an import package, with their versions."""
    names = sorted(set(importlib.metadata.packages_distributions().get(module, ())))
    return {name: distribution_version(name) or "unknown" for name in names}


def runtime_problems(distributions: Mapping[str, str]) -> list[Problem]:
    """What is wrong with the onnxruntime distributions: none, several, too old."""
    if not distributions:
        return [
            Problem(False, "onnxruntime is not installed", "pip install 'onnx-sparseconv[cpu]' (or [cuda13], [cuda12])")
        ]
    if len(distributions) > 1:
        names = " and ".join(distributions)
        text = f"{names} are installed over each other: the last one installed wins, often without CUDA"
        remedy = f"pip uninstall {' '.join(distributions)}, then install the one that you want"
        return [Problem(True, text, remedy)]
    name, version = next(iter(distributions.items()))
    if version_tuple(version) < _OLDEST_ONNXRUNTIME:
        oldest = ".".join(map(str, _OLDEST_ONNXRUNTIME))
        return [Problem(True, f"{name} {version} is too old", f"pip install '{name}>={oldest}'")]
    return []


def cupy_problems(runtimes: Mapping[str, str], cupys: Mapping[str, str]) -> list[Problem]:
    """What is wrong between cupy and onnxruntime-gpu: they have to be built for the same CUDA."""
    problems = []
    if len(cupys) > 1:
        remedy = f"pip uninstall {' '.join(cupys)}, then install the one that you want"
        problems.append(Problem(True, f"{' and '.join(cupys)} are installed over each other", remedy))
    gpu = runtimes.get("onnxruntime-gpu")
    if gpu is None:
        return problems
    wanted = 13 if version_tuple(gpu) >= _FIRST_CUDA13 else 12
    for name in cupys:
        match = re.fullmatch(rf"{_CUPY_PREFIX}(\d+)x", name)
        if match and int(match[1]) != wanted:
            text = f"onnxruntime-gpu {gpu} is built for CUDA {wanted}, {name} for CUDA {match[1]}"
            problems.append(Problem(True, text, f"pip uninstall {name}; pip install 'onnx-sparseconv[cuda{wanted}]'"))
    return problems


def graphsurgeon_problems(onnx_version: str | None, graphsurgeon_version: str | None) -> list[Problem]:
    """onnx-graphsurgeon up to 0.5.8 cannot be imported with onnx from 1.20 on."""
    if onnx_version is None or graphsurgeon_version is None:
        missing = "onnx" if onnx_version is None else "onnx-graphsurgeon"
        return [Problem(False, f"{missing} is not installed", f"pip install {missing}")]
    old = version_tuple(graphsurgeon_version) <= _LAST_BROKEN_GRAPHSURGEON
    if old and version_tuple(onnx_version) >= _GRAPHSURGEON_BREAKS_WITH_ONNX:
        text = f"onnx-graphsurgeon {graphsurgeon_version} does not work with onnx {onnx_version}"
        return [Problem(True, text, "pip install 'onnx-graphsurgeon>=0.6.1'")]
    return []


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``1.27.0rc1`` gives (1, 27, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def check_library() -> LibraryCheck:
    """Find the native library, load it, and ask for its version."""
    from onnx_sparseconv.custom_ops.library import library_path  # noqa: PLC0415

    try:
        path = str(library_path())
    except SparseConvError as error:
        return LibraryCheck(None, None, str(error))
    try:
        ask = ctypes.CDLL(path).SparseConvVersion
    except (OSError, AttributeError) as error:
        return LibraryCheck(path, None, f"the native library cannot be loaded: {error}")
    ask.argtypes, ask.restype = [], ctypes.c_char_p
    return LibraryCheck(path, (ask() or b"").decode(errors="replace"), "")


def library_problems(library: LibraryCheck, package_version: str) -> list[Problem]:
    """What is wrong with the native library: missing, broken, or of another version than the package."""
    remedy = "reinstall it: pip install --force-reinstall onnx-sparseconv"
    if library.problem:
        return [Problem(False, library.problem, remedy)]
    if library.version and library.version != package_version and not package_version.endswith("unknown"):
        return [Problem(True, f"the native library is {library.version}, the package {package_version}", remedy)]
    return []


def provider_problems(providers: Sequence[ProviderCheck]) -> list[Problem]:
    """Providers that this onnxruntime has and that do not work."""
    remedies = {
        "cuda": "check the NVIDIA driver with nvidia-smi, and that onnxruntime-gpu is built for a CUDA it supports",
        "cpu": "reinstall onnxruntime; if that does not help, please report it",
    }
    return [
        Problem(False, f"provider {p.name} does not work: {p.text}", remedies[p.name])
        for p in providers
        if p.built_in and not p.works
    ]
