"""The public API: what it offers, and that importing it is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

import onnx_sparseconv as sc


def test_every_public_name_is_there() -> None:
    assert {name: getattr(sc, name) is not None for name in sc.__all__} == dict.fromkeys(sc.__all__, True)
    assert dir(sc) == sorted(sc.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        sc.nonsense  # noqa: B018


def test_importing_the_package_imports_neither_onnx_nor_onnxruntime() -> None:
    code = "import onnx_sparseconv, sys; print(sorted({'onnx', 'onnxruntime', 'cupy', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
