"""Trying a provider of ONNX Runtime for real: a tiny SparseConv model, in a process of its own.

A process of its own, because what is broken in a GPU's software does not always raise: it may crash.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass

from onnx_sparseconv.runtime.session import Provider

_TIMEOUT_S = 120
# The child imports what this process would: a package that is not installed is found by its path alone.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from onnx_sparseconv.runtime.provider_trial import main; main(sys.argv[2])"
)


@dataclass(frozen=True)
class ProviderCheck:
    """One provider of ONNX Runtime, tried with a tiny SparseConv model.

    Attributes:
        name: as given to ``--provider``.
        built_in: whether this onnxruntime has it at all.
        works: whether the model ran on it and gave the right numbers.
        text: the result, or why it does not work.
        kernel: the native library's name of the kernel that ran, with its instruction set; empty when none ran.
    """

    name: str
    built_in: bool
    works: bool
    text: str
    kernel: str = ""


def check_provider(provider: Provider) -> ProviderCheck:
    """Try a provider in a process of its own."""
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), provider]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return ProviderCheck(provider, True, False, f"gave no answer within {_TIMEOUT_S} s")
    return read_answer(provider, done.returncode, done.stdout, done.stderr)


def read_answer(provider: Provider, returncode: int, stdout: str, stderr: str) -> ProviderCheck:
    """What the child's end means."""
    lines = stdout.splitlines()
    if returncode == 0 and lines:
        return ProviderCheck(**json.loads(lines[-1]))
    last_words = (stderr.strip().splitlines() or ["no message"])[-1]
    if returncode < 0:
        last_words = f"the process crashed ({signal.Signals(-returncode).name})"
    return ProviderCheck(provider, True, False, last_words)
