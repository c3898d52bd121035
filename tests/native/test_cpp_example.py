"""examples/cpp compiles, and gives the results that Python gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

from onnx_sparseconv.custom_ops.schema import Activation
from tests.support.native_build import ROOT, find_tool
from tests.support.sparse_models import (
    SparseConvCase,
    geometry_2d,
    make_model,
    make_session,
    random_inputs,
    random_weight,
)

CASE = SparseConvCase(random_weight((8, 3, 3, 3), 0.3), geometry_2d(3, 2, 1), Activation.RELU, has_bias=False)
SHAPE = (2, 3, 17, 15)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The example, compiled against the library in the onnxruntime package, which comes without its header."""
    if sys.platform != "linux":
        pytest.skip("links against the Linux package's library")
    libraries = sorted((Path(ort.__file__).parent / "capi").glob("libonnxruntime.so*"))
    if not libraries:
        pytest.skip("this onnxruntime package has no libonnxruntime.so")
    folder = tmp_path_factory.mktemp("example")
    # The loader asks for libonnxruntime.so.1, the package has the file under its full version.
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / name).symlink_to(libraries[-1])
    command = [find_tool("g++", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    command += ["-I", ROOT / "tests/native/stand_in", ROOT / "examples/cpp/run_model.cc", "-o", folder / "run_model"]
    command += ["-L", folder, "-lonnxruntime", f"-Wl,-rpath,{folder}"]
    subprocess.run(command, check=True)
    return folder / "run_model"


def run(program, *arguments):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_the_example_computes_what_python_does(program, native_library, tmp_path):
    model = make_model(CASE)
    inputs = random_inputs(CASE, SHAPE)
    (wanted,) = make_session(model).run(None, inputs)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "input.bin").write_bytes(inputs["X"].tobytes())
    shape = ",".join(map(str, SHAPE))
    done = run(program, tmp_path / "model.onnx", native_library, tmp_path / "input.bin", shape, tmp_path / "output.bin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Y: {wanted.size} values: ")
    assert (tmp_path / "output.bin").read_bytes() == wanted.tobytes()


def test_the_example_says_what_is_wrong(program, native_library, tmp_path):
    (tmp_path / "input.bin").write_bytes(b"")
    arguments = [tmp_path / "input.bin", "1,3,5,5", tmp_path / "output.bin"]
    assert "usage" in run(program).stderr
    missing = run(program, tmp_path / "model.onnx", native_library, *arguments)
    assert missing.returncode == 1
    assert "model.onnx" in missing.stderr
    assert run(program, tmp_path / "model.onnx", tmp_path / "none.so", *arguments).returncode == 1
