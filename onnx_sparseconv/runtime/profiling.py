"""Times and places of single nodes, from ONNX Runtime's profiler, in a session of its own: profiling slows a run down.

On CUDA a node's time is by itself only that of the launch: the GPU computes later. So a model is profiled on CUDA in a
process of its own in which the driver lets every launch wait for its kernel. Such a time is the kernel's plus that of a
launch (several microseconds), and the sum over the nodes is more than a run takes.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from onnx_sparseconv.errors import ModelError, SparseConvError
from onnx_sparseconv.runtime.inputs import Array, read_npz, write_npz
from onnx_sparseconv.runtime.layer_times import NodeTime, is_convolution, read_profile, with_names
from onnx_sparseconv.runtime.run import run_session
from onnx_sparseconv.runtime.session import PROVIDER_NAMES, Provider, make_session, measuring_options
from onnx_sparseconv.runtime.timing import Clock, TimingPlan, measure

PROFILED_RUNS = 20
_WARMUP = 2
_TIMEOUT_S = 600
# The driver reads it when the process first uses the GPU.
_WAIT_FOR_EVERY_KERNEL = {"CUDA_LAUNCH_BLOCKING": "1"}
# The child imports what this process would: a package that is not installed is found by its path alone.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from onnx_sparseconv.runtime.profiling import main; main(sys.argv[2])"
)


@dataclass(frozen=True)
class ProfileJob:
    """What to profile.

    Attributes:
        model: the file.
        provider, threads, use_library, provider_options, config: as in `make_session`.
        runs: how many runs to take the median of.
    """

    model: str
    provider: Provider
    threads: int | None
    use_library: bool
    provider_options: Mapping[str, str]
    config: Mapping[str, str]
    runs: int = PROFILED_RUNS


@dataclass(frozen=True)
class NodePlace:
    """A node that ran elsewhere than asked.

    Attributes:
        node: ONNX Runtime's name of it.
        op_type: its operator.
        provider: where it ran, such as ``CPUExecutionProvider``.
    """

    node: str
    op_type: str
    provider: str


def profile(
    job: ProfileJob, structure: onnx.ModelProto, arrays: Mapping[str, Array], *, in_child: bool | None = None
) -> tuple[NodeTime, ...]:
    """Median time of every node.

    Args:
        job: what to profile.
        structure: the model of the job, without its external data.
        arrays: its inputs.
        in_child: whether in a process of its own; None: on CUDA.

    Raises:
        SparseConvError: the model cannot be loaded or run.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = _named_model(job.model, structure, directory)
        if not (job.provider == "cuda" if in_child is None else in_child):
            return _profile_here(job, model, arrays, directory)
        write_npz(directory / "inputs.npz", arrays)
        return _profile_in_child(job, model, directory)


def profile_in_turn(
    jobs: Sequence[ProfileJob],
    structures: Sequence[onnx.ModelProto],
    arrays: Mapping[str, Array],
    plan: TimingPlan,
    clock: Clock,
) -> tuple[tuple[NodeTime, ...], ...]:
    """Median times of every node of several models, run in turn in this process: slow minutes hit all of them alike.

    Args:
        jobs: what to profile; ``runs`` does not count.
        structures: the jobs' models, without their external data.
        arrays: their inputs.
        plan: how often to run.
        clock: nanoseconds.

    Raises:
        SparseConvError: a model cannot be loaded or run.
    """
    with tempfile.TemporaryDirectory() as name:
        opened = []
        for number, (job, structure) in enumerate(zip(jobs, structures, strict=True)):
            directory = Path(name) / str(number)
            directory.mkdir()
            opened.append(_Profiled(job, _named_model(job.model, structure, directory), directory))
        measure([functools.partial(one.run, arrays) for one in opened], plan, clock=clock)
        return tuple(read_profile(one.end(), one.num_runs) for one in opened)


def nodes_elsewhere(nodes: Sequence[NodeTime], provider: Provider) -> tuple[NodePlace, ...]:
    """Nodes of a profile that did not run on ``provider``: those that ONNX Runtime gave to the CPU."""
    wanted = PROVIDER_NAMES[provider]
    return tuple(
        NodePlace(node.name, node.op_type, node.provider) for node in nodes if node.provider and node.provider != wanted
    )


def main(directory: str) -> None:
    """Body of the child: profile the job that lies in a directory; the profile is left there.

    An error that a user can mend goes to stdout, on a line of its own, as JSON.
    """
    place = Path(directory)
    description = json.loads((place / "job.json").read_text(encoding="utf-8"))
    model = Path(description.pop("profiled_model"))
    try:
        path = _write_profile(ProfileJob(**description), model, read_npz(place / "inputs.npz"), place)
    except SparseConvError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
    else:
        sys.stdout.write(json.dumps({"profile": str(path)}) + "\n")


def _profile_here(job: ProfileJob, model: Path, arrays: Mapping[str, Array], directory: Path) -> tuple[NodeTime, ...]:
    return read_profile(_write_profile(job, model, arrays, directory), _WARMUP + job.runs)


def _profile_in_child(job: ProfileJob, model: Path, directory: Path) -> tuple[NodeTime, ...]:
    description = {
        **vars(job),
        "provider_options": dict(job.provider_options),
        "config": dict(job.config),
        "profiled_model": str(model.resolve()),
    }
    (directory / "job.json").write_text(json.dumps(description), encoding="utf-8")
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), str(directory)]
    environment = {**os.environ, **_WAIT_FOR_EVERY_KERNEL}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{job.model}: profiling it took more than {_TIMEOUT_S} s") from error
    lines = done.stdout.splitlines()
    answer = json.loads(lines[-1]) if done.returncode == 0 and lines else {}
    if "profile" not in answer:
        last_words = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(answer.get("error") or f"{job.model}: profiling it failed ({last_words})")
    return read_profile(answer["profile"], _WARMUP + job.runs)


def _write_profile(job: ProfileJob, model: Path, arrays: Mapping[str, Array], directory: Path) -> Path:
    profiled = _Profiled(job, model, directory)
    for _ in range(_WARMUP + job.runs):
        profiled.run(arrays)
    return profiled.end()


class _Profiled:
    """A session that writes down when every node began and ended."""

    def __init__(self, job: ProfileJob, model: Path, directory: Path) -> None:
        self._name = job.model
        self._session = make_session(
            model,
            provider=job.provider,
            threads=job.threads,
            use_library=job.use_library,
            session_options=measuring_options(job.config),
            provider_options=job.provider_options,
            profile=directory / "profile",
        )
        self.num_runs = 0

    def run(self, arrays: Mapping[str, Array]) -> None:
        """Run once."""
        run_session(self._session, arrays, self._name)
        self.num_runs += 1

    def end(self) -> Path:
        """The file with the profile of all runs."""
        path = Path(self._session.end_profiling())
        if not path.is_file():
            raise ModelError(f"{self._name}: ONNX Runtime wrote no profile")
        return path


def _named_model(model: str, structure: onnx.ModelProto, directory: Path) -> Path:
    """A file of the model with a name for every layer; the file as it is where it has them all, or external data."""
    if all(node.name for node in structure.graph.node if is_convolution(node)):
        return Path(model)
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in structure.graph.initializer):
        return Path(model)
    path = directory / "named.onnx"
    path.write_bytes(with_names(structure).SerializeToString())
    return path
