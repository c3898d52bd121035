"""The tests here need the native library: that of $ONNX_SPARSECONV_LIBRARY, the installed one, or one built now."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("onnxruntime", reason="the native library is run by onnxruntime (the extra 'cpu')")

from onnx_sparseconv.custom_ops import library
from onnx_sparseconv.errors import NativeLibraryError
from tests.support.native_build import ROOT, build_library


@pytest.fixture(scope="session", autouse=True)
def native_library():
    try:
        return library.library_path()
    except NativeLibraryError:
        if os.environ.get(library.LIBRARY_VARIABLE):
            raise
    path = build_library(
        ROOT / "build" / f"tests-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}", "-DSPARSECONV_WARNINGS_AS_ERRORS=ON"
    )
    os.environ[library.LIBRARY_VARIABLE] = str(path)
    return path
