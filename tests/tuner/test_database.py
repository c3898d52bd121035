"""The database of measurements: what is found again, what is not, and what survives."""

from __future__ import annotations

import json
import math
import multiprocessing

import pytest

from onnx_sparseconv.tuner.database import Database, LayerTimes, default_database
from onnx_sparseconv.tuner.setting import differences
from tests.tuner.fakes import SETTING, add_many

NAMES = ("dense", "sparse")
TIMES = LayerTimes({"dense": 100.0, "sparse": 50.5}, {}, 1.5, 2.5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "tuning.jsonl"


def open_database(path, preset="quick", **other):
    return Database(path, SETTING | other, preset)


def filled(path, *layers):
    database = open_database(path)
    for layer in layers or ("layer",):
        database.add(layer, TIMES)
    return database


def test_what_was_measured_is_found_again(path):
    assert filled(path).find("layer", NAMES) == TIMES
    again = open_database(path)
    assert again.find("layer", NAMES) == TIMES
    assert again.find("other", NAMES) is None
    assert (again.num_found, again.notes) == (1, ())


def test_the_newest_counts(path):
    database = filled(path)
    newer = LayerTimes({"dense": 1.0, "sparse": 2.0}, {})
    database.add("layer", newer)
    assert open_database(path).find("layer", NAMES) == newer


@pytest.mark.parametrize(
    "other",
    [
        {"processor": "a slide rule"},
        {"gpu": "a GPU"},
        {"driver": "600"},
        {"onnxruntime": "2.0"},
        {"library": "1"},
        {"provider": "cuda"},
        {"threads": 2},
        {"threads": None},
    ],
)
def test_another_setting_is_said_and_measured_again(path, other):
    filled(path)
    database = open_database(path, **other)
    assert database.find("layer", NAMES) is None
    assert database.find("unknown", NAMES) is None
    (name,) = other
    (note,) = database.notes
    assert note.startswith(f"1 measured before with {name} ")
    assert note.endswith(": measured again")
    assert open_database(path).find("layer", NAMES) == TIMES


def test_a_more_thorough_measurement_serves_but_not_a_quicker_one(path):
    open_database(path, "default").add("layer", TIMES)
    assert open_database(path, "quick").find("layer", NAMES) == TIMES
    thorough = open_database(path, "thorough")
    assert thorough.find("layer", NAMES) is None
    assert "preset default, now thorough" in thorough.notes[0]


def test_further_candidates_are_measured(path):
    assert filled(path).find("layer", (*NAMES, "another")) is None


def test_what_could_not_run_is_tried_again(path):
    database = open_database(path)
    database.add("layer", LayerTimes({"dense": 100.0, "sparse": math.inf}, {"sparse": "out of memory"}))
    assert "Infinity" not in path.read_text()
    assert open_database(path).find("layer", NAMES) is None


@pytest.mark.parametrize(
    "damage",
    [
        b"garbage\n",
        b"\x00\xff\xfe\n",
        b'{"schema_version": 2}\n',
        b"[]\n",
        b'{"schema_version": 2, "layer": "layer", "preset": "quick", "setting": {}, "times_us": {"dense": "x"}, '
        b'"problems": {}, "reorder_us": [0, 0]}\n',
        b'{"schema_version": 2, "layer": "layer", "preset": "quick", "setting": {}, "times_us": {"dense": -1}, '
        b'"problems": {}, "reorder_us": [0, 0]}\n',
    ],
)
def test_a_broken_line_costs_that_line(path, damage):
    filled(path, "a", "b")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + damage + lines[1])
    database = open_database(path)
    assert (database.find("a", NAMES), database.find("b", NAMES)) == (TIMES, TIMES)
    assert "1 of 3 lines cannot be read" in database.notes[0]


def test_a_torn_last_line_does_not_spoil_the_next(path):
    filled(path, "a", "b")
    path.write_bytes(path.read_bytes()[:-20])
    filled(path, "c")
    database = open_database(path)
    assert [database.find(name, NAMES) is not None for name in "abc"] == [True, False, True]


def test_lines_of_another_schema_are_left_alone(path):
    filled(path)
    line = json.loads(path.read_text())
    path.write_text(json.dumps(line | {"schema_version": 99}) + "\n")
    database = open_database(path)
    assert (database.find("layer", NAMES), database.notes) == (None, ())


def test_a_file_that_cannot_be_written_costs_a_note(tmp_path):
    (tmp_path / "file").write_text("")
    database = open_database(tmp_path / "file" / "tuning.jsonl")
    database.add("layer", TIMES)
    database.add("another", TIMES)
    assert database.find("layer", NAMES) == TIMES
    assert any("cannot be kept" in note for note in database.notes)
    assert len(database.notes) == len(set(database.notes)) <= 2
    directory = open_database(tmp_path)
    assert "cannot be read" in directory.notes[0]


def test_several_processes_share_a_file(path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=add_many, args=(path, name, 30)) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    database = open_database(path)
    assert database.notes == ()
    assert all(database.find(f"{name}{number}", NAMES) == TIMES for name in "ab" for number in range(30))


def test_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("ONNX_SPARSECONV_CACHE", str(tmp_path))
    assert default_database() == tmp_path / "tuning.jsonl"
    monkeypatch.delenv("ONNX_SPARSECONV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_database() == tmp_path / "onnx-sparseconv" / "tuning.jsonl"


def test_differences_in_words():
    assert differences(SETTING, SETTING) == []
    assert differences(SETTING, SETTING | {"threads": None}) == ["threads 1, now not set"]
    assert differences({}, SETTING) == []
