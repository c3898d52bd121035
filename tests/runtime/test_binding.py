from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.runtime import binding as binding_module
from onnx_sparseconv.runtime.binding import BoundRuns, TensorSpec, copies_beyond_cache, specs_of
from onnx_sparseconv.runtime.session import make_session
from tests.runtime import networks

X = np.random.default_rng(0).standard_normal((2, 8, 12, 12)).astype(np.float32)


def _spec(array):
    return {"y": TensorSpec(array.shape, array.dtype)}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_bound_runs_give_what_plain_runs_give(dtype):
    session = make_session(networks.sparse(networks.weights(dtype)))
    (wanted,) = session.run(None, {"x": X.astype(dtype)})
    runs = BoundRuns(session, "m", {"x": X.astype(dtype)}, specs_of({"y": wanted}), "cpu")
    runs()
    (got,) = runs.outputs().values()
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, wanted)


def test_every_copy_is_run_in_turn_and_has_a_memory_of_its_own(pair):
    session = make_session(pair[1])
    runs = BoundRuns(session, "m", {"x": X}, _spec(X), "cpu", copies=3)
    used = []
    session_run = session.run_with_iobinding

    class Spy:
        def __getattr__(self, name):
            return getattr(session, name)

        def run_with_iobinding(self, bound, options):
            used.append((runs._bindings.index(bound), _entry(options, "gpu_graph_id"), _waits(options)))
            session_run(bound, options)

    runs._session = Spy()
    for _ in range(4):
        runs()
    runs.burst(3)
    assert [copy for copy, _, _ in used] == [0, 1, 2, 0, 1, 2, 0]
    assert [waits for _, _, waits in used] == [True] * 4 + [False, False, True]
    assert {graph for _, graph, _ in used} == {None}
    results = {runs._bindings[i].get_outputs()[0].data_ptr() for i in range(3)}
    assert len(results) == 3
    np.testing.assert_array_equal(runs.outputs()["y"], session.run(None, {"x": X})[0])


def test_inputs_are_updated_in_place(pair):
    session = make_session(pair[1])
    runs = BoundRuns(session, "m", {"x": X.copy()}, _spec(X), "cpu", copies=2)
    places = [value.data_ptr() for _, value in runs._values]
    runs()
    runs.update({"x": 2 * X})
    assert [value.data_ptr() for _, value in runs._values] == places
    for _ in range(2):
        runs()
        np.testing.assert_array_equal(runs.outputs()["y"], session.run(None, {"x": 2 * X})[0])
    for wrong in (X.astype(np.float16), X[:1]):
        with pytest.raises(ModelError, match=r"m: input x is bound as tensor\(float\) of shape \[2, 8, 12, 12\], got"):
            runs.update({"x": wrong})


def test_every_copy_has_a_graph_of_its_own(pair):
    runs = BoundRuns(make_session(pair[1]), "m", {"x": X}, _spec(X), "cpu", copies=2, cuda_graph=True)
    runs()
    waiting, hurrying = (
        [_entry(options, "gpu_graph_id") for options in group]
        for group in (runs._options, runs._options_without_waiting)
    )
    assert waiting == hurrying == ["1", "2"]


def test_every_type_but_text_is_bound():
    session = make_session(networks.every_type(), use_library=False)
    feed = {value.name: np.ones((2, 4), _dtype(session, value.name)) for value in session.get_inputs()}
    specs = {f"{name}/out:0": TensorSpec(array.shape, array.dtype) for name, array in feed.items()}
    with pytest.raises(ModelError, match="m: input string is text"):
        BoundRuns(session, "m", feed, specs, "cpu")
    del feed["string"]
    with pytest.raises(ModelError, match="m: output string/out:0 is text"):
        BoundRuns(session, "m", feed, specs, "cpu")


def _dtype(session, name):
    from onnx_sparseconv.runtime.inputs import DTYPES

    return DTYPES[next(value.type for value in session.get_inputs() if value.name == name)]


def test_a_device_that_this_onnxruntime_does_not_have_is_an_error(pair):
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(ModelError, match="the model: its inputs and outputs cannot be placed in cuda memory"):
        BoundRuns(make_session(pair[1]), "the model", {"x": X}, _spec(X), "cuda")


def test_a_run_that_fails_names_the_model(pair):
    wrong = {"y": TensorSpec((1, 2, 3), X.dtype)}
    with pytest.raises(ModelError, match="the model cannot be run"):
        BoundRuns(make_session(pair[1]), "the model", {"x": X}, wrong, "cpu")()
    with pytest.raises(UsageError, match="at least one copy"):
        BoundRuns(make_session(pair[1]), "the model", {"x": X}, _spec(X), "cpu", copies=0)


def test_an_output_that_nobody_described_is_an_error(pair):
    with pytest.raises(ModelError, match="m: output y is none of z"):
        BoundRuns(make_session(pair[1]), "m", {"x": X}, {"z": TensorSpec(X.shape, X.dtype)}, "cpu")


def test_enough_copies_to_leave_a_cache():
    assert copies_beyond_cache(1 << 30, 60 << 20) == 2
    assert copies_beyond_cache(30 << 20, 60 << 20) == 4
    assert copies_beyond_cache(1, 60 << 20) == 16
    assert copies_beyond_cache(0, 60 << 20) == 16


def test_the_size_of_a_tensor():
    assert TensorSpec((2, 3), np.dtype(np.float16)).size_bytes == 12
    assert TensorSpec((), np.dtype(np.float32)).size_bytes == 4


def _entry(options, key):
    try:
        return options.get_run_config_entry(key)
    except RuntimeError:
        return None


def _waits(options):
    return _entry(options, binding_module.NO_SYNCHRONISATION_ENTRY) is None
