"""Builds the native library from the source tree, for tests that have no installed one or need a special build."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def find_tool(*names):
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.skip(f"needs one of {', '.join(names)}")
    return None


def build_library(build_dir, *cmake_options):
    """Configure and build; returns the library's path. Running it again only rebuilds what has changed."""
    cmake = find_tool("cmake")
    find_tool(os.environ.get("CXX", "c++"), "g++", "clang++")
    subprocess.run([cmake, "-S", ROOT, "-B", build_dir, *cmake_options], check=True, capture_output=True)
    subprocess.run([cmake, "--build", build_dir, "--parallel", "2"], check=True, capture_output=True)
    return build_dir / "libonnx_sparseconv.so"
