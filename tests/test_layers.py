"""Imports go downwards only."""

import ast
from pathlib import Path

import pytest

import onnx_sparseconv

PACKAGE = Path(onnx_sparseconv.__file__).parent
# A module may import its own layer and those below. The package itself is the public API, above all but the CLI.
LAYERS = {
    "__main__": 8,
    "cli": 7,
    "": 6,
    "tuner": 5,
    "report": 5,
    "converter": 4,
    "runtime": 4,
    "passes": 3,
    "custom_ops": 2,
    "kernels": 1,
    "errors": 0,
    "files": 0,
    "nodes": 0,
    "text": 0,
    "version": 0,
}
# Layers that must not know each other although they are of one height.
STRANGERS = {("converter", "runtime"), ("report", "tuner"), ("report", "converter"), ("report", "runtime")}
# What conversion may not need: whatever runs models or compiles kernels.
RUNTIMES = {"onnxruntime", "cupy", "cuda", "typer", "rich"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(name):
    """``onnx_sparseconv.converter.analyse`` -> ``converter``; the package's own attributes belong to the package."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""


def name_of(path):
    relative = path.relative_to(PACKAGE.parent).with_suffix("")
    parts = [p for p in relative.parts if p != "__init__"]
    return ".".join(parts)


def imports_of(path):
    """All modules that a file imports, also within functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they lead"
            # `from package import module` imports the module.
            yield node.module
            if node.module == "onnx_sparseconv":
                yield from (f"onnx_sparseconv.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_its_own_layer_and_those_below(path):
    own = layer_of(name_of(path))
    for name in imports_of(path):
        if name.split(".")[0] != "onnx_sparseconv" or name == "onnx_sparseconv":
            continue
        other = layer_of(name)
        assert LAYERS[other] <= LAYERS[own], f"{own or 'the package'} imports {name}"
        for pair in STRANGERS:
            assert own == other or {own, other} != set(pair), f"{own} imports {name}"
        if LAYERS[own] == 0:
            assert other == own or (own, other) == ("files", "errors"), f"{own} imports {name}"


def test_every_module_is_in_a_layer():
    for path in MODULES:
        parts = name_of(path).split(".")
        assert len(parts) == 1 or parts[1] in LAYERS, f"{name_of(path)}: add its layer to this test"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_conversion_needs_no_runtime(path):
    if layer_of(name_of(path)) in ("converter", "passes", "kernels", "errors", "files", "version"):
        assert not {name.split(".")[0] for name in imports_of(path)} & RUNTIMES
