"""The Conv cases that the onnx package itself carries, all forced sparse, with the library and without."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper

from onnx_sparseconv.converter import ConvertOptions, convert
from onnx_sparseconv.custom_ops.library import register

CONVERTED = Path(onnx.__file__).parent / "backend" / "test" / "data"
# ONNX Runtime 1.20 knows opset 21.
MAX_OPSET = 21


@dataclass(frozen=True)
class Case:
    """A model with one input left, its weight and bias made initializers, and the outputs that onnx expects."""

    name: str
    model: ModelProto
    feed: dict[str, np.ndarray]
    expected: np.ndarray


def _freeze(model: ModelProto, values: dict[str, np.ndarray]) -> ModelProto:
    """Make every input but the first an initializer; IR and opset brought to what all runtimes of the test know."""
    frozen = ModelProto()
    frozen.CopyFrom(model)
    kept = [i for i in frozen.graph.input if i.name not in values]
    del frozen.graph.input[:]
    frozen.graph.input.extend(kept)
    present = {t.name for t in frozen.graph.initializer}
    frozen.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in values.items() if n not in present)
    frozen.ir_version = min(max(frozen.ir_version, 4), 8)
    for imported in frozen.opset_import:
        imported.version = min(imported.version, MAX_OPSET)
    return frozen


def _node_cases() -> Iterator[Case]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases("Conv")
    for case in cases:
        if case.model is None or [n.op_type for n in case.model.graph.node] != ["Conv"]:
            continue
        (inputs, outputs) = case.data_sets[0]
        names = [i.name for i in case.model.graph.input]
        values = {n: np.asarray(v) for n, v in zip(names[1:], inputs[1:], strict=True)}
        yield Case(case.name, _freeze(case.model, values), {names[0]: np.asarray(inputs[0])}, np.asarray(outputs[0]))


def _converted_cases() -> Iterator[Case]:
    for folder in sorted(CONVERTED.glob("pytorch-*/test_*onv*")):
        model = onnx.load(str(folder / "model.onnx"))
        if [n.op_type for n in model.graph.node] != ["Conv"]:
            continue
        values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        feed = next(i.name for i in model.graph.input if i.name not in values)
        data = folder / "test_data_set_0"
        x, y = (numpy_helper.to_array(onnx.load_tensor(str(data / f"{n}_0.pb"))) for n in ("input", "output"))
        yield Case(folder.name, _freeze(model, values), {feed: x}, y)


@cache
def all_cases() -> tuple[Case, ...]:
    return (*_node_cases(), *_converted_cases())


def test_the_onnx_package_carries_the_cases() -> None:
    assert len(list(_node_cases())) == 6
    assert len(list(_converted_cases())) >= 26


@pytest.mark.parametrize("with_library", [True, False], ids=["library", "plain"])
@pytest.mark.parametrize("case", all_cases(), ids=lambda c: c.name)
def test_case(case: Case, with_library: bool) -> None:
    converted, report = convert(case.model, options=ConvertOptions(force=True))
    assert converted is not None
    assert report.model.num_rewritten == 1
    assert [n.op_type for n in converted.graph.node] == ["SparseConv"]
    options = ort.SessionOptions()
    if with_library:
        register(options)
    session = ort.InferenceSession(converted.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, case.feed)
    np.testing.assert_allclose(got, case.expected, rtol=1e-4, atol=1e-5)
