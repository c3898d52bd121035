"""Mutated nodes never crash the process; under the sanitizers, they do not touch memory that is not theirs either."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.native_build import ROOT, find_tool

FOLDER = ROOT / "tests" / "native"


def test_a_thousand_mutants_do_not_crash():
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", FOLDER / "fuzz_attributes.py", "--count", "1000"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = {line.split(": ")[0]: int(line.split(": ")[1]) for line in done.stdout.splitlines()}
    assert sum(outcomes.values()) == 1000
    # The mutants would test little if all of them were stopped at the same door.
    assert outcomes["refused"] > 300
    assert outcomes["ran"] > 100


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizers' runtime")
def test_under_the_sanitizers():
    find_tool("g++")
    done = subprocess.run(
        [find_tool("bash"), FOLDER / "run_sanitized.sh"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
