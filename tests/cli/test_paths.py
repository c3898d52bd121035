from __future__ import annotations

import os

import pytest

from onnx_sparseconv.cli.paths import directories, require_distinct, require_no_inputs
from onnx_sparseconv.errors import ModelError, UsageError


def test_directories_that_stay_empty_are_taken_away_again(tmp_path):
    (tmp_path / "before").mkdir()
    wanted = [tmp_path / "a" / "b" / "c", tmp_path / "a" / "d", tmp_path / "before"]
    with directories(wanted):
        assert all(path.is_dir() for path in wanted)
        (tmp_path / "a" / "d" / "file").touch()
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "a",
        "a/d",
        "a/d/file",
        "before",
    ]


def test_directories_do_not_outlive_an_error(tmp_path):
    def fail():
        with directories([tmp_path / "a" / "b"]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_takes_the_others_with_it(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ModelError, match="cannot make the directory"),
        directories([tmp_path / "a", tmp_path / "file" / "b"]),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_outputs_that_are_inputs_are_found_by_whatever_path(tmp_path):
    model = tmp_path / "m.onnx"
    model.touch()
    (tmp_path / "link.onnx").symlink_to(model)
    os.link(model, tmp_path / "hard.onnx")
    (tmp_path / "up").mkdir()
    for name in ("m.onnx", "link.onnx", "hard.onnx", "up/../m.onnx"):
        with pytest.raises(UsageError, match="is the input"):
            require_no_inputs([tmp_path / "new.onnx", tmp_path / name], [model])
    with pytest.raises(UsageError, match="is a directory"):
        require_no_inputs([tmp_path / "up"], [model])
    require_no_inputs([tmp_path / "new.onnx"], [model])


def test_two_outputs_of_one_name_are_found(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="one name"):
        require_distinct([tmp_path / "a", tmp_path / "b", tmp_path / "link" / "a"])
    require_distinct([tmp_path / "a", tmp_path / "b"])
