from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.files import OutputError
from onnx_sparseconv.runtime.inputs import (
    ModelInput,
    check_inputs,
    load_inputs,
    make_random_inputs,
    model_inputs,
    parse_shape,
    parse_shapes,
    read_npz,
    resolve_shapes,
    write_npz,
)
from onnx_sparseconv.runtime.run import run_session
from onnx_sparseconv.runtime.session import make_session
from tests.runtime import networks

IMAGE = ModelInput("x", "tensor(float)", ("N", 3, "H", "W"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x:1x3x224x224", ("x", (1, 3, 224, 224))),
        ("input:0:1x3", ("input:0", (1, 3))),
        ("x:5", ("x", (5,))),
        ("x:", ("x", ())),
        ("x:1X3", ("x", (1, 3))),
        ("a x b:0x2", ("a x b", (0, 2))),
    ],
)
def test_a_shape_is_parsed(text, expected):
    assert parse_shape(text) == expected


@pytest.mark.parametrize("text", ["", "x", ":1x3", "x:1x", "x:1,3", "x:-1x3", "x:1xNx3"])
def test_a_bad_shape_is_a_usage_error(text):
    with pytest.raises(UsageError, match="1x3x224x224"):
        parse_shape(text)


def test_two_shapes_for_one_input_are_a_usage_error():
    with pytest.raises(UsageError, match="two different shapes"):
        parse_shapes(["x:1x3", "x:1x4"])
    assert parse_shapes(["x:1x3", "y:2", "x:1x3"]) == {"x": (1, 3), "y": (2,)}


@given(st.text(min_size=1), st.lists(st.integers(0, 10**6), max_size=6))
def test_parsing_inverts_writing(name, dims):
    assert parse_shape(f"{name}:{'x'.join(map(str, dims))}") == (name, tuple(dims))


def test_the_batch_is_filled_in_and_nothing_else():
    assert resolve_shapes([ModelInput("x", "tensor(float)", (None, 3, 8, 8))]) == {"x": (1, 3, 8, 8)}
    assert resolve_shapes([ModelInput("x", "tensor(float)", ("N", 3, 8, 8))], batch=4) == {"x": (4, 3, 8, 8)}
    assert resolve_shapes([ModelInput("x", "tensor(float)", ())]) == {"x": ()}
    with pytest.raises(
        UsageError, match=r"dimension 2 of input x \(tensor\(float\), N x 3 x H x W\).*--shape x:1x3x224"
    ):
        resolve_shapes([IMAGE])


def test_an_open_length_is_not_taken_for_a_batch():
    with pytest.raises(UsageError, match="--shape audio:"):
        resolve_shapes([ModelInput("audio", "tensor(float)", ("samples",))])
    assert resolve_shapes([ModelInput("flags", "tensor(bool)", ("batch",))], batch=3) == {"flags": (3,)}


def test_a_given_shape_decides_for_dimensions_of_the_same_name():
    mask = ModelInput("mask", "tensor(float)", ("N", 1, "H", "W"))
    assert resolve_shapes([mask, IMAGE], {"x": (2, 3, 20, 30)}) == {"mask": (2, 1, 20, 30), "x": (2, 3, 20, 30)}


@pytest.mark.parametrize(
    ("shapes", "batch", "message"),
    [
        ({"z": (1,)}, None, "no input z; it has x"),
        ({"x": (1, 3, 8)}, None, "does not fit"),
        ({"x": (1, 4, 8, 8)}, None, "does not fit"),
        ({}, 0, "at least 1"),
    ],
)
def test_shapes_that_contradict_the_model_are_usage_errors(shapes, batch, message):
    with pytest.raises(UsageError, match=message):
        resolve_shapes([IMAGE], shapes, batch)


def test_a_batch_that_the_model_fixes_otherwise_is_a_usage_error():
    fixed = ModelInput("x", "tensor(float)", (1, 3, 8, 8))
    assert resolve_shapes([fixed], batch=1) == {"x": (1, 3, 8, 8)}
    with pytest.raises(UsageError, match="fixes the batch size"):
        resolve_shapes([fixed], batch=2)


def test_inputs_of_every_type_are_made_run_and_written(tmp_path):
    session = make_session(networks.every_type(), use_library=False)
    wanted = model_inputs(session)
    arrays = make_random_inputs(wanted, resolve_shapes(wanted, batch=3), seed=5)
    assert len(arrays) == 13
    outputs = run_session(session, arrays, "model")
    for name, array in arrays.items():
        np.testing.assert_array_equal(outputs[f"{name}/out:0"], array)
    write_npz(tmp_path / "out.npz", outputs)
    again = read_npz(tmp_path / "out.npz")
    assert again.keys() == outputs.keys()
    for name, array in outputs.items():
        np.testing.assert_array_equal(again[name], array)
    assert again["float16/out:0"].dtype == np.float16


def test_inputs_read_from_a_file_feed_a_model_with_strings(tmp_path):
    session = make_session(networks.every_type(), use_library=False)
    wanted = model_inputs(session)
    arrays = make_random_inputs(wanted, resolve_shapes(wanted), seed=5)
    write_npz(tmp_path / "in.npz", arrays)
    outputs = run_session(session, load_inputs(tmp_path / "in.npz", wanted), "model")
    np.testing.assert_array_equal(outputs["string/out:0"], arrays["string"])


def test_random_inputs_depend_on_the_seed_alone():
    shapes = {"x": (2, 3)}
    wanted = [ModelInput("x", "tensor(float)", (2, 3))]
    first, second, other = (make_random_inputs(wanted, shapes, seed)["x"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)
    assert (first < 0).any()


def test_types_that_numpy_lacks_are_refused():
    with pytest.raises(ModelError, match="bfloat16"):
        make_random_inputs([ModelInput("x", "tensor(bfloat16)", (1,))], {"x": (1,)})


def test_an_absurd_shape_is_refused_before_it_is_made():
    with pytest.raises(UsageError, match="bytes"):
        make_random_inputs([ModelInput("x", "tensor(float)", ("N",))], {"x": (10**12,)})


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "no array for input x; it holds nothing"),
        ({"x": np.zeros((1, 3, 4, 4), np.float64)}, "needs float32, got float64"),
        ({"x": np.zeros((1, 3, 4), np.float32)}, "shape 1x3x4"),
        ({"x": np.zeros((1, 2, 4, 4), np.float32)}, "shape 1x2x4x4"),
        ({"x": np.zeros((1, 3, 4, 4), np.float32), "z": np.zeros(1)}, "the model has no input z"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays, message):
    with pytest.raises(ModelError, match=message):
        check_inputs(arrays, [IMAGE], "file.npz")


def test_files_that_are_no_inputs_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", x=np.asarray([{}], object))
    whole = (tmp_path / "objects.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.npz").write_bytes(b"")
    messages = {
        "text.npz": "is no .npz file",
        "empty.npz": "is no .npz file",
        "one.npy": "one array without a name",
        "objects.npz": "'x' holds Python objects",
        "cut.npz": "not a readable .npz file",
        "absent.npz": "no such file",
    }
    for name, message in messages.items():
        with pytest.raises(ModelError, match=f"{name}: .*{message}") as caught:
            read_npz(tmp_path / name)
        assert "pickle" not in str(caught.value)


def zipped(path, name="x.npy", compression=zipfile.ZIP_STORED, changes=()):
    """An array in a zip file, some of whose bytes are then changed: (of the directory at its end, where, to what)."""
    array = io.BytesIO()
    np.save(array, np.ones(9, np.float32))
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr(name, array.getvalue() if name.endswith(".npy") else b"hello")
    data = bytearray(path.read_bytes())
    for of_directory, place, value in changes:
        data[place + (data.rfind(b"PK\1\2") if of_directory else 0)] = value
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "how",
    [
        {"changes": [(False, 6, 1), (True, 8, 1)]},  # encrypted
        {"changes": [(False, 8, 9), (True, 10, 9)]},  # Deflate64
        {"compression": zipfile.ZIP_LZMA, "changes": [(False, place, 255) for place in range(50, 80)]},
        {"name": "x"},
    ],
    ids=["encrypted", "Deflate64", "broken LZMA", "no array"],
)
def test_what_a_zip_file_may_hold_besides_is_refused(tmp_path, how):
    with pytest.raises(ModelError, match=r"x\.npz: not a readable \.npz file"):
        read_npz(zipped(tmp_path / "x.npz", **how))


@pytest.mark.parametrize("name", ["y" * 70000, "y\0a"])
def test_names_that_no_zip_file_can_hold_are_refused(tmp_path, name):
    with pytest.raises(OutputError, match="rename that output of the model"):
        write_npz(tmp_path / "out.npz", {name: np.zeros(1)})
    assert not (tmp_path / "out.npz").exists()
