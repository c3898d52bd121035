"""ONNX Runtime sessions that run ``SparseConv`` nodes with the native library.

`make_session` is the public helper. It differs from ``onnxruntime.InferenceSession`` in three ways: the custom-op
library is registered, the provider that was asked for is the one that runs or an error is raised (ONNX Runtime itself
falls back to the CPU and only logs it), and every failure is one of this package's errors with one line of text.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from onnx_sparseconv.errors import ModelError, NativeLibraryError, ProviderError, SparseConvError, UsageError
from onnx_sparseconv.files import require_text_name
from onnx_sparseconv.kernels.cuda_driver import read_cuda_driver
from onnx_sparseconv.runtime.cuda_libraries import load_cuda_libraries

if TYPE_CHECKING:
    import onnx
    import onnxruntime as ort

    from onnx_sparseconv.custom_ops.library import CpuIsa

Provider = Literal["cpu", "cuda"]
PROVIDERS: tuple[Provider, ...] = get_args(Provider)
PROVIDER_NAMES: dict[Provider, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

# Errors are raised; ONNX Runtime would log them on stderr as well.
LOG_FATAL_ONLY = 4

# Of threads, the most that a run may have.
_MOST_THREADS_A_PROCESSOR = 4
_MOST_THREADS_ANYWHERE = 64


def import_onnxruntime() -> ModuleType:
    """The onnxruntime module.

    Raises:
        NativeLibraryError: it is not installed, or cannot be loaded.
    """
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise NativeLibraryError(
            f"onnxruntime cannot be imported ({error}). Install it: pip install 'onnx-sparseconv[cpu]'"
        ) from error
    if not hasattr(runtime, "InferenceSession"):
        raise NativeLibraryError(
            "onnxruntime is installed but empty, as after removing one of two onnxruntime packages. "
            "Reinstall it: pip install --force-reinstall 'onnx-sparseconv[cpu]'"
        )
    return runtime


def most_threads() -> int:
    """Threads that a run may have: 4 for each processor of the machine, and 64 on any.

    ONNX Runtime makes as many as it is told. Thousands leave a machine unusable, and the process deaf to SIGTERM.
    """
    return max(_MOST_THREADS_ANYWHERE, _MOST_THREADS_A_PROCESSOR * (os.cpu_count() or 1))


def check_threads(threads: int | None) -> None:
    """Check a number of threads; None is ONNX Runtime's choice.

    Raises:
        UsageError: it is less than 1 or more than `most_threads`.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be at least 1, got {threads}")
    if threads is not None and threads > most_threads():
        raise UsageError(f"threads must be at most {most_threads()} on this machine, got {threads}")


def make_session(
    model: str | Path | bytes | onnx.ModelProto,
    *,
    provider: Provider = "cpu",
    threads: int | None = None,
    use_library: bool = True,
    session_options: ort.SessionOptions | None = None,
    provider_options: Mapping[str, str] | None = None,
    profile: str | Path | None = None,
    cpu_isa: CpuIsa = "auto",
) -> ort.InferenceSession:
    """Make an ONNX Runtime session that runs the model's SparseConv nodes with the native library.

    ::

        session = make_session("model.sparse.onnx", threads=4)
        outputs = session.run(None, {"images": images})

    Args:
        model: a file, serialised bytes, or a model in memory (below 2 GB).
        provider: ``cpu`` or ``cuda``. With ``cuda``, nodes that CUDA cannot run still go to the CPU, as always in ONNX
            Runtime.
        threads: threads of one run, at most `most_threads`; None leaves it to ONNX Runtime (the physical cores).
        use_library: register the native library. Without it the SparseConv nodes of a converted model become dense
            Conv.
        session_options: your own options; the library is registered on them, once, however often they are used. None
            makes options that log nothing: errors are raised. For a converted model on CUDA nothing has to be set.
        provider_options: options of the provider, such as ``{"device_id": "1"}`` for CUDA. ``{"enable_cuda_graph":
            "1"}`` suits a converted model whose nodes all run on CUDA; then its shapes must not change and inputs and
            outputs have to be bound to device memory. Leave ``prefer_nhwc`` at 0 unless ``sparseconv bench`` shows a
            gain: SparseConv keeps the channels first, so it gets a transpose on either side.
        profile: prefix of the profile that ONNX Runtime writes (``session.end_profiling()`` gives its name); None: no
            profile.
        cpu_isa: instruction set of the CPU kernels: ``auto``, or the name of one to force it.

    Raises:
        ProviderError: the provider would not be used; the text says why.
        NativeLibraryError: onnxruntime or the native library is missing or cannot be loaded.
        ModelError: ONNX Runtime cannot load the model.
        UsageError: an argument is out of range.
    """
    if provider not in PROVIDERS:
        raise UsageError(f"unknown provider {provider!r}: use one of {', '.join(PROVIDERS)}")
    check_threads(threads)
    runtime = import_onnxruntime()
    _require_provider_is_built_in(runtime, provider)
    source, name = _model_source(model)
    options = session_options or _quiet_options(runtime)
    if provider == "cuda":
        load_cuda_libraries(runtime)
    if threads is not None:
        options.intra_op_num_threads = threads
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    if use_library:
        from onnx_sparseconv.custom_ops.library import register  # noqa: PLC0415

        register(options, cpu_isa=cpu_isa)
    with translated_errors(f"ONNX Runtime cannot load {name}"):
        session = _create(runtime, source, options, provider, dict(provider_options or {}))
    _require_provider_is_used(session, provider)
    return session


@contextlib.contextmanager
def translated_errors(what: str) -> Iterator[None]:
    """Turn ONNX Runtime's own exceptions into ``ModelError: <what>: <their first line>``; let all others through."""
    try:
        yield
    except Exception as error:
        if isinstance(error, SparseConvError) or not is_onnxruntime_error(error):
            raise
        raise ModelError(f"{what}: {onnxruntime_message(error)}") from error


def is_onnxruntime_error(error: BaseException) -> bool:
    """Whether ONNX Runtime raised it.

    Its exceptions share no base class, and some are plain RuntimeError and ValueError.
    """
    if isinstance(error, MemoryError):
        return False
    if type(error).__module__.startswith("onnxruntime"):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("onnxruntime")


def onnxruntime_message(error: BaseException) -> str:
    """The text of one of ONNX Runtime's exceptions on one line, without the codes in front."""
    text = " ".join(str(error).split())
    prefix = "[ONNXRuntimeError] : "
    if text.startswith(prefix):
        text = text.removeprefix(prefix).split(" : ", 2)[-1]
    return text


def measuring_options(config: Mapping[str, str] | None = None) -> ort.SessionOptions:
    """Options that log nothing but what is fatal, and that let no idle thread of one session slow down another.

    Args:
        config: session configuration entries, such as ``{"sparseconv.cuda_kernel": "csr"}``.
    """
    options = _quiet_options(import_onnxruntime())
    options.add_session_config_entry("session.force_spinning_stop", "1")
    for key, value in (config or {}).items():
        options.add_session_config_entry(key, value)
    return options


def _quiet_options(runtime: ModuleType) -> ort.SessionOptions:
    options: ort.SessionOptions = runtime.SessionOptions()
    options.log_severity_level = LOG_FATAL_ONLY
    return options


def _model_source(model: str | Path | bytes | onnx.ModelProto) -> tuple[str | bytes, str]:
    """What InferenceSession takes, and the model's name for messages."""
    if isinstance(model, bytes):
        return model, "the model"
    if isinstance(model, (str, Path)):
        path = Path(model)
        require_text_name(path)
        if not path.is_file():
            raise ModelError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        return str(path), str(path)
    try:
        return model.SerializeToString(), "the model"
    except Exception as error:  # protobuf's own exception types differ between its versions
        raise ModelError(f"the model cannot be serialised ({error}); above 2 GB save it to a file first") from error


def _create(
    runtime: ModuleType,
    source: str | bytes,
    options: ort.SessionOptions,
    provider: Provider,
    provider_options: dict[str, str],
) -> ort.InferenceSession:
    providers: list[Any] = [(PROVIDER_NAMES[provider], provider_options)]
    if PROVIDER_NAMES[provider] != PROVIDER_NAMES["cpu"]:
        providers.append(PROVIDER_NAMES["cpu"])
    # Without the fall-back a failing provider raises; with it, ONNX Runtime prints to stdout and takes another one.
    session = runtime.InferenceSession(source, options, providers=providers, enable_fallback=0)
    session.disable_fallback()
    return session


def _require_provider_is_built_in(runtime: ModuleType, provider: Provider) -> None:
    name = PROVIDER_NAMES[provider]
    available = runtime.get_available_providers()
    if name not in available:
        raise ProviderError(
            f"this onnxruntime {runtime.__version__} has no {name}, only {', '.join(available)}. Install a build with "
            "it and remove the other: pip uninstall onnxruntime; pip install 'onnx-sparseconv[cuda13]' (or [cuda12])"
        )


def _require_provider_is_used(session: ort.InferenceSession, provider: Provider) -> None:
    name, used = PROVIDER_NAMES[provider], session.get_providers()
    if name in used:
        return
    problem = (
        read_cuda_driver().problem or "its CUDA or cuDNN libraries cannot be loaded; ONNX Runtime's log says which"
    )
    raise ProviderError(f"{name} was asked for, but ONNX Runtime would use {', '.join(used)}: {problem}")
