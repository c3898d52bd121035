"""Broken inputs and outputs that cannot be written: one clear error, nothing left behind."""

import dataclasses
import re
import resource
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnx_sparseconv.converter import ConvertOptions, convert, inspect, prune, restore
from onnx_sparseconv.converter.model_io import load, save
from onnx_sparseconv.converter.report import Reason
from onnx_sparseconv.custom_ops.schema import DOMAIN, SPARSE_CONV, SPARSE_CONV_ADD, concat_op
from onnx_sparseconv.errors import ModelError, SparseConvError
from onnx_sparseconv.kernels.unified_csr import UnifiedCSR
from tests.support.odd_models import FEEDS, conv, model, ornate, pruned, tensor
from tests.support.plain_ort import assert_close, inputs_for, run
from tests.support.sparse_nodes import attributes_for, sparse_model

# The package's name "restore" is the function.
restore_module = sys.modules["onnx_sparseconv.converter.restoration"]
FORCE = ConvertOptions(force=True)


@pytest.fixture(autouse=True, scope="module")
def _weights_stay_small():
    """A damaged node may ask for a weight just below the limit; with the real limit that takes gigabytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore_module, "MAX_WEIGHT_BYTES", 2**26)
        yield


def files_in(folder):
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*"))


def converted():
    proto, _ = convert(FEEDS["initializer"].build())
    return proto


COMMANDS = {
    "inspect": lambda source, _: inspect(source),
    "convert": lambda source, target: convert(source, target, FORCE),
    "prune": lambda source, target: prune(source, target, sparsity=0.9),
    "restore": restore,
}
commands = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())


def one_clear_error(command, source, target):
    """Run it; it fails with one line that names the file, and writes nothing."""
    before = files_in(target.parent)
    with pytest.raises(SparseConvError) as caught:
        command(source, target)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert files_in(target.parent) == before
    return message


def external_model(folder, **attributes):
    """A model whose weight lies in ``weights.bin``."""
    proto = FEEDS["initializer"].build()
    data = proto.graph.initializer[0].raw_data
    (folder / "weights.bin").write_bytes(data)
    weight = TensorProto(name="W", data_type=1, dims=[8, 16, 3, 3], data_location=TensorProto.EXTERNAL)
    for key, text in ({"location": "weights.bin", "length": str(len(data))} | attributes).items():
        if text is not None:
            weight.external_data.add(key=key, value=text)
    proto.graph.initializer[0].CopyFrom(weight)
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


# --- files that are no models --------------------------------------------------------------------------------------

PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489")
FOREIGN = {
    "empty": b"",
    "text": b"This is not a model.\n" * 50,
    "json": b'{"graph": []}',
    "png": PNG,
    "zip": b"PK\x03\x04" + bytes(100),
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00",
}


@commands
@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN.keys())
def test_foreign_files(command, data, tmp_path):
    source = tmp_path / "foreign.onnx"
    source.write_bytes(data)
    message = one_clear_error(command, source, tmp_path / "out.onnx")
    assert "foreign.onnx" in message


@commands
def test_files_that_are_not_there_or_no_files(command, tmp_path):
    assert "missing.onnx: cannot be read" in one_clear_error(command, tmp_path / "missing.onnx", tmp_path / "o.onnx")
    (tmp_path / "folder.onnx").mkdir()
    assert "folder.onnx: is a folder: name the models in it" in one_clear_error(
        command, tmp_path / "folder.onnx", tmp_path / "o.onnx"
    )


@commands
def test_truncated_files(command, tmp_path):
    """Cut at any length, a file is refused, or (cut between two fields) is a model with less in it."""
    whole = (converted() if command is COMMANDS["restore"] else ornate()).SerializeToString()
    source, target = tmp_path / "cut.onnx", tmp_path / "out.onnx"
    refused, messages = 0, []
    lengths = sorted({*range(0, len(whole), max(1, len(whole) // 60)), *range(len(whole) - 20, len(whole))})
    for length in lengths:
        source.write_bytes(whole[:length])
        try:
            command(source, target)
        except SparseConvError as error:
            refused += 1
            messages.append(str(error))
            assert not target.exists()
        target.unlink(missing_ok=True)
        assert files_in(tmp_path) == ["cut.onnx"]
    assert refused > 0.8 * len(lengths)
    assert not [m for m in messages if "\n" in m or not m]


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300))
def test_random_bytes(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("random")
    source = folder / "random.onnx"
    source.write_bytes(data)
    for command in COMMANDS.values():
        with pytest.raises(SparseConvError):
            command(source, folder / "out.onnx")
    assert files_in(folder) == ["random.onnx"]


SEEDS = {name: FEEDS[name].build for name in ("initializer", "chain", "dequantised", "outer-if", "function-twice")}
SEEDS |= {"ornate": ornate, "converted": converted}


@pytest.mark.parametrize("build", SEEDS.values(), ids=SEEDS.keys())
@settings(deadline=None, max_examples=120, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_flipped_bytes_are_an_error_or_a_model(build, data):
    """A damaged file is refused with one of our errors, or read."""
    raw = bytearray(build().SerializeToString())
    # Weights are long; most flips should hit what describes the model.
    places = st.one_of(st.integers(0, min(300, len(raw) - 1)), st.integers(max(0, len(raw) - 500), len(raw) - 1))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(places)] = data.draw(st.integers(0, 255))
    try:
        proto = onnx.ModelProto.FromString(bytes(raw))
    except Exception:
        return
    messages = []
    for command in (
        lambda: inspect(proto),
        lambda: convert(proto, options=FORCE),
        lambda: prune(proto, None, sparsity=0.9),
        lambda: restore(proto, None),
    ):
        try:
            command()
        except SparseConvError as error:
            messages.append(str(error))
    assert not [m for m in messages if "\n" in m or not m]


def test_a_model_that_breaks_a_rule_is_refused_with_the_rule(tmp_path):
    proto = model([conv("unknown")])
    path = tmp_path / "bad.onnx"
    path.write_bytes(proto.SerializeToString())
    for source in (path, proto):
        with pytest.raises(ModelError, match=r"not valid ONNX: .*unknown"):
            inspect(source)


def test_names_that_are_no_text_are_refused_and_documentation_is_kept():
    proto = FEEDS["initializer"].build()
    proto.graph.node[0].doc_string = "text"
    raw = proto.SerializeToString()
    odd = onnx.ModelProto.FromString(raw.replace(b"text", b"\xff\xfe\xfdt"))
    once, _ = convert(odd)
    assert b"\xff\xfe\xfdt" in once.graph.node[0].SerializeToString()
    broken = onnx.ModelProto.FromString(raw.replace(b"conv", b"\xff\xfe\xfdv"))
    for command in (inspect, convert, restore):
        with pytest.raises(ModelError, match="UTF-8"):
            command(broken)


# --- external data ---------------------------------------------------------------------------------------------------


def test_external_data_is_read_and_goes_with_the_weight(tmp_path):
    source = external_model(tmp_path)
    target = tmp_path / "out.onnx"
    _, report = convert(source, target)
    assert report.converted
    assert report.bytes_before == source.stat().st_size + (tmp_path / "weights.bin").stat().st_size
    plain = FEEDS["initializer"].build()
    inputs = inputs_for(plain)
    assert_close(run(target, inputs)[0], run(plain, inputs)[0], 144, 100)
    restore(target, tmp_path / "back.onnx")
    # The only external tensor went with the Conv, so the results need no second file.
    assert files_in(tmp_path) == ["back.onnx", "model.onnx", "out.onnx", "weights.bin"]
    back = load(tmp_path / "back.onnx").proto
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(back.graph.initializer[0]), pruned())


def test_who_may_read_a_model_may_read_its_data(tmp_path):
    target = tmp_path / "out.onnx"
    save(FEEDS["initializer"].build(), target, external=True)
    assert (tmp_path / "out.onnx.data").stat().st_mode == target.stat().st_mode


def test_data_that_is_a_link_is_followed_or_told(tmp_path):
    """As caches of models lay them out; some versions of onnx follow links."""
    source = external_model(tmp_path)
    (tmp_path / "weights.bin").rename(tmp_path / "blob")
    (tmp_path / "weights.bin").symlink_to("blob")
    try:
        onnx.checker.check_model(str(source))
    except onnx.checker.ValidationError:
        with pytest.raises(ModelError, match="is a symbolic link, which onnx does not follow: copy both files"):
            inspect(source)
    else:
        assert inspect(source).num_rewritten == 1


@commands
def test_data_that_are_missing_are_named(command, tmp_path):
    source = external_model(tmp_path)
    (tmp_path / "weights.bin").unlink()
    message = one_clear_error(command, source, tmp_path / "out.onnx")
    assert message == f"{source}: its data file weights.bin is missing: keep it beside the model"


def test_external_data_may_be_read_from_another_directory(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    external_model(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "b")
    _, report = convert("../a/model.onnx", "out.onnx")
    assert report.converted
    monkeypatch.chdir(tmp_path / "a")
    assert inspect("model.onnx").num_rewritten == 1


BAD_EXTERNAL = {
    "missing": {"location": "nowhere.bin"},
    "outside": {"location": "../weights.bin"},
    "absolute": {"location": "/etc/hostname"},
    "empty name": {"location": ""},
    "beyond the end": {"offset": "4000"},
    "huge offset": {"offset": str(2**40)},
    "negative offset": {"offset": "-4"},
    "no number": {"offset": "x"},
    "short": {"length": "8"},
}


@commands
@pytest.mark.parametrize("entries", BAD_EXTERNAL.values(), ids=BAD_EXTERNAL.keys())
def test_bad_external_data(command, entries, tmp_path):
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "weights.bin").write_bytes(bytes(10000))
    source = external_model(folder, **entries)
    message = one_clear_error(command, source, tmp_path / "out.onnx")
    assert "model.onnx" in message


def test_external_data_that_is_cut_off_is_noticed_for_any_tensor(tmp_path):
    """onnx reads what is there; the weight of a Gemm must not get shorter silently."""
    source = external_model(tmp_path)
    proto = onnx.load(source, load_external_data=False)
    proto.graph.initializer[0].name = "other"
    proto.graph.initializer.append(tensor(pruned(), "W"))
    source.write_bytes(proto.SerializeToString())
    data = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(data[:-4])
    message = one_clear_error(COMMANDS["convert"], source, tmp_path / "out.onnx")
    assert re.search(r"other|weights\.bin", message)


def test_an_entry_without_a_length_takes_what_it_needs(tmp_path):
    source = external_model(tmp_path, length=None)
    with (tmp_path / "weights.bin").open("ab") as file:
        file.write(bytes(100))
    _, report = convert(source)
    assert report.model.num_rewritten == 1


def test_a_model_in_memory_whose_data_are_elsewhere(tmp_path, monkeypatch):
    source = external_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="path"):
        convert(onnx.load(source, load_external_data=False))


# --- models that end the process in the shape inference of an older onnx -------------------------------------------


def one_node(op_type, *functions, x_shape=(1, 16, 6, 6)):
    graph = helper.make_graph(
        [helper.make_node(op_type, ["X", "W"], ["Y"], domain="local" if functions else "")],
        "g",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, x_shape)],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(pruned(), "W")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions)


def calling(name, *others):
    nodes = [helper.make_node(other, ["x", "w"], ["y"], domain="local") for other in others]
    return helper.make_function("local", name, ["x", "w"], ["y"], nodes, [helper.make_opsetid("local", 1)])


ENDS_THE_PROCESS = {
    "a function calls itself": one_node("f", calling("f", "f")),
    "functions call each other": one_node("f", calling("f", "g"), calling("g", "f")),
    "two axes": one_node("Conv", x_shape=(1, 16)),
    "three axes": one_node("Conv", x_shape=(1, 16, 6)),
}


@pytest.mark.parametrize("proto", ENDS_THE_PROCESS.values(), ids=ENDS_THE_PROCESS.keys())
def test_what_an_older_onnx_cannot_infer_is_read_or_refused(proto):
    messages = []
    for command in (lambda: inspect(proto), lambda: convert(proto, options=FORCE)):
        try:
            command()
        except SparseConvError as error:
            messages.append(str(error))
    assert not [m for m in messages if "\n" in m or not m]


# --- hostile nodes ------------------------------------------------------------------------------------------------

HOSTILE = {
    "columns": ("weight_columns", np.full(144, 999, np.uint16)),
    "counts": ("weight_nnz_per_row", np.asarray([2**31 - 1], np.int32)),
    "order": ("weight_row_order", np.zeros(8, np.int32)),
    "values": ("weight_values", np.zeros(3, np.float32)),
    "shape": ("weight_shape", np.asarray([2**31, 2**31, 3, 3], np.int64)),
    "height": ("weight_slice_height", np.asarray(0, np.int64)),
    "strides": ("strides", [0, 0]),
    "kernel": ("kernel_shape", [2, 2]),
    "pads": ("pads", [-1, 0, 0, 0]),
    "group": ("group", 5),
    "activation": ("activation", np.asarray(99, np.int64)),
    "element type": ("element_type", 7),
}


@pytest.mark.parametrize(("name", "hostile"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_attributes(name, hostile, tmp_path):
    """inspect reports the node as invalid, restore refuses and names it."""
    proto = sparse_model(attributes_for(pruned()), SPARSE_CONV)
    node = proto.graph.node[0]
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    new = onnx.numpy_helper.from_array(hostile, name) if isinstance(hostile, np.ndarray) else hostile
    node.attribute.append(helper.make_attribute(name, new))
    path = tmp_path / "hostile.onnx"
    path.write_bytes(proto.SerializeToString())
    (layer,) = inspect(path).layers
    assert layer.verdict.reason is Reason.INVALID
    assert layer.verdict.text
    message = one_clear_error(COMMANDS["restore"], path, tmp_path / "out.onnx")
    assert "'sparse'" in message
    assert convert(path, options=FORCE)[0] is None


@pytest.mark.parametrize("hostile", [[16], [8, 8, 0], [1, 2], [-8, 24], [2**62, 2**62], None])
def test_hostile_channels_of_inputs(hostile):
    proto = sparse_model(attributes_for(pruned()), concat_op(2))
    node = proto.graph.node[0]
    kept = [a for a in node.attribute if a.name != "input_channels"]
    del node.attribute[:]
    node.attribute.extend(kept)
    if hostile is not None:
        node.attribute.append(helper.make_attribute("input_channels", hostile))
    (layer,) = inspect(proto).layers
    assert layer.verdict.reason is Reason.INVALID
    assert "input_channels" in layer.verdict.text
    with pytest.raises(ModelError, match=r"sparse.*input_channels"):
        restore(proto)
    assert convert(proto, options=FORCE)[0] is None


def test_a_small_node_that_stands_for_a_huge_weight(monkeypatch):
    """One entry, of a weight of 8 GB: inspected without rebuilding it, and not restored."""
    csr = UnifiedCSR(
        np.ones(1, np.float32),
        np.asarray([5], np.uint32),
        *(np.asarray([v], np.int32) for v in (1, 0)),
        1,
        (1, 2**31 - 1, 1, 1),
    )
    proto = sparse_model(dataclasses.replace(attributes_for(pruned((1, 1, 1, 1))), weight=csr), SPARSE_CONV)
    monkeypatch.setattr(restore_module, "MAX_WEIGHT_BYTES", 2**31)
    monkeypatch.setattr(np, "zeros", lambda *_, **__: pytest.fail("allocated"))
    (layer,) = inspect(proto).layers
    assert layer.nonzeros == 1
    assert layer.num_weights == 2**31 - 1
    assert layer.zero_in_channels == 2**31 - 2
    with pytest.raises(ModelError, match=r"sparse.*larger"):
        restore(proto)


@pytest.mark.parametrize(
    "name", [a.name for a in sparse_model(attributes_for(pruned()), SPARSE_CONV).graph.node[0].attribute]
)
def test_a_missing_attribute(name):
    proto = sparse_model(attributes_for(pruned()), SPARSE_CONV)
    node = proto.graph.node[0]
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    assert inspect(proto).layers[0].verdict.reason is Reason.INVALID
    with pytest.raises(ModelError, match=f"sparse.*{name}"):
        restore(proto)


# --- outputs that cannot be written -------------------------------------------------------------------------------

WRITERS = {k: v for k, v in COMMANDS.items() if k != "inspect"}
writers = pytest.mark.parametrize("name", WRITERS)


def source_for(name):
    return converted() if name == "restore" else FEEDS["initializer"].build()


@writers
def test_directories_that_cannot_take_the_file(name, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "missing" / "o.onnx", tmp_path / "file" / "o.onnx", tmp_path / "folder"):
        before = files_in(tmp_path)
        with pytest.raises(SparseConvError, match="cannot be written") as caught:
            WRITERS[name](source_for(name), target)
        assert "\n" not in str(caught.value)
        assert str(target) in str(caught.value)
        assert files_in(tmp_path) == before


@writers
@pytest.mark.parametrize("failing", ["replace", "write_bytes"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failing_disk_leaves_everything_as_it_was(name, failing, existing, tmp_path, monkeypatch):
    target = tmp_path / "out.onnx"
    if existing:
        target.write_bytes(b"older")
    before = files_in(tmp_path)

    def fail(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, failing, fail)
    with pytest.raises(SparseConvError, match=r"out\.onnx: cannot be written: No space left on device"):
        WRITERS[name](source_for(name), target)
    monkeypatch.undo()
    assert files_in(tmp_path) == before
    if existing:
        assert target.read_bytes() == b"older"


def test_when_the_model_cannot_take_its_place_its_old_data_come_back(tmp_path, monkeypatch):
    """Model and data are two files; the old model must never stand beside the new data."""
    source = FEEDS["initializer"].build()
    target = tmp_path / "out.onnx"
    save(source, target, external=True)
    before = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}
    assert set(before) == {"out.onnx", "out.onnx.data"}
    other = model([conv()], [tensor(pruned(seed=9), "W")])
    replace = Path.replace

    def fail(self, place):
        if Path(place).name == "out.onnx":
            raise OSError(5, "Input/output error")
        return replace(self, place)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ModelError, match="Input/output error"):
        save(other, target, external=True)
    monkeypatch.undo()
    assert {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)} == before
    (tmp_path / "fresh").mkdir()
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ModelError):
        save(other, tmp_path / "fresh" / "out.onnx", external=True)
    assert files_in(tmp_path / "fresh") == []


def test_saving_an_invalid_model_writes_nothing(tmp_path):
    with pytest.raises(ModelError, match="not valid ONNX"):
        save(model([conv("unknown")]), tmp_path / "out.onnx")
    assert files_in(tmp_path) == []


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "model.onnx"
    target.write_bytes(b"older")
    (tmp_path / "link.onnx").symlink_to(target)
    convert(FEEDS["initializer"].build(), tmp_path / "link.onnx")
    assert (tmp_path / "link.onnx").is_symlink()
    assert inspect(target).converted_by


def test_a_constant_without_a_value_is_known_at_run_time_alone():
    _, report = convert(model([helper.make_node("Constant", [], ["W"]), conv()]), options=FORCE)
    (layer,) = report.model.layers
    assert layer.verdict.reason is Reason.RUNTIME_WEIGHT


def test_two_versions_of_the_operators_are_refused(tmp_path):
    proto = FEEDS["initializer"].build()
    proto.opset_import.append(helper.make_opsetid("ai.onnx", proto.opset_import[0].version - 1))
    with pytest.raises(ModelError, match="the model: imports ONNX's own operators in the versions"):
        inspect(proto)
    onnx.save(proto, tmp_path / "two.onnx")
    with pytest.raises(ModelError, match=r"two\.onnx: imports ONNX's own operators"):
        convert(tmp_path / "two.onnx", options=FORCE)


LACKING = [(SPARSE_CONV, []), (SPARSE_CONV_ADD, ["X", ""]), (SPARSE_CONV, [""])]
LACKING += [(concat_op(2), ["X", ""]), (concat_op(3), ["X", "", "X2", ""]), (concat_op(2), ["", "", "X2"])]


@pytest.mark.parametrize(("op_type", "inputs"), LACKING)
def test_a_node_that_lacks_an_input(op_type, inputs):
    proto = sparse_model(attributes_for(pruned()), op_type)
    proto.graph.node[0].input[:] = inputs
    del proto.functions[:]
    inspect(proto)
    with pytest.raises(ModelError, match=r"sparse.*input"):
        restore(proto)


def test_an_older_output_is_replaced_as_a_whole(tmp_path):
    target = tmp_path / "out.onnx"
    target.write_bytes(b"older")
    convert(FEEDS["initializer"].build(), target)
    assert inspect(target).converted_by
    assert files_in(tmp_path) == ["out.onnx"]


def test_nothing_is_written_on_a_dry_run_or_when_nothing_qualifies(tmp_path):
    target = tmp_path / "out.onnx"
    proto, report = convert(FEEDS["initializer"].build(), target, ConvertOptions(dry_run=True))
    assert proto is None
    assert report.converted
    assert report.output is None
    assert report.bytes_after
    proto, report = convert(FEEDS["runtime-input"].build(), target, FORCE)
    assert proto is None
    assert not report.converted
    assert report.output is None
    assert files_in(tmp_path) == []


def test_a_long_file_name_is_no_obstacle(tmp_path):
    target = tmp_path / ("n" * 245 + ".onnx")
    convert(FEEDS["initializer"].build(), target)
    assert target.is_file()


@pytest.mark.slow
def test_a_model_over_two_gigabytes(tmp_path):
    """A Conv beside 2.2 GB of other weights, kept in a sparse file."""
    rows = 1030 * 2**20 // 4 // 1024
    proto = model(
        [conv(), helper.make_node("ReduceMax", ["big1"], ["m1"]), helper.make_node("ReduceMax", ["big2"], ["m2"])],
        [tensor(pruned(), "W")],
        outputs=[*model([conv()]).graph.output, *(helper.make_tensor_value_info(m, 1, [1, 1]) for m in ("m1", "m2"))],
    )
    size = rows * 1024 * 4
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(2 * size)
    for index in (1, 2):
        big = TensorProto(name=f"big{index}", data_type=1, dims=[rows, 1024], data_location=TensorProto.EXTERNAL)
        for key, number in {"location": "big.bin", "offset": (index - 1) * size, "length": size}.items():
            big.external_data.add(key=key, value=str(number))
        proto.graph.initializer.append(big)
    source, target = tmp_path / "big.onnx", tmp_path / "out.onnx"
    source.write_bytes(proto.SerializeToString())
    _, report = convert(source, target)
    assert report.converted
    assert report.bytes_before > 2**31
    assert files_in(tmp_path) == ["big.bin", "big.onnx", "out.onnx", "out.onnx.data"]
    written = onnx.load(target, load_external_data=False)
    assert {t.name for t in written.graph.initializer} == {"big1", "big2"}
    assert (tmp_path / "out.onnx.data").stat().st_size >= 2 * size
    assert [n.op_type for n in written.graph.node] == ["SparseConv", "ReduceMax", "ReduceMax"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak < 8 * 2**30
    (tmp_path / "out.onnx.data").unlink()


# --- functions in the place of the bodies -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [SPARSE_CONV, concat_op(2)])
def test_a_function_of_another_kind_with_the_name_of_an_operator_is_refused(name, tmp_path):
    """The converted model would call it, and fail to load."""
    proto = model([conv(out="h"), helper.make_node(name, ["h"], ["Y"], domain=DOMAIN)], [tensor(pruned(), "W")])
    imports = [helper.make_opsetid("", 17)]
    relu = helper.make_function(DOMAIN, name, ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], imports)
    proto.functions.append(relu)
    proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    source = tmp_path / "model.onnx"
    source.write_bytes(proto.SerializeToString())
    for options in (FORCE, dataclasses.replace(FORCE, precision="fp16")):
        message = one_clear_error(lambda a, b, o=options: convert(a, b, o), source, tmp_path / "out.onnx")
        assert message == f"{source}: its own function ai.sparseconv::{name} has the name of an operator: rename it"
