"""Reading and writing model files. Nothing else in the package touches them.

A file that is written is checked first, and appears whole or not at all: it is made in a temporary directory beside
its place, then renamed.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError, Message
from onnx import ModelProto, TensorProto
from onnx.external_data_helper import load_external_data_for_model, set_external_data, uses_external_data

from onnx_sparseconv.converter.loose_models import name_apart, name_graph, sort_nodes, state_output_shapes
from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.files import is_link, is_special, is_there, pass_on, read_special, require_text_name, resolved
from onnx_sparseconv.nodes import iterate_nodes, subgraphs

# Protobuf's limit on one message. A little is left for what is not tensor data.
MAX_INLINE_BYTES = 2**31 - 2**24
_MAX_FILE_BYTES = 2**31 - 1
# Smaller tensors stay in the model file when the rest goes into an external one.
MIN_EXTERNAL_BYTES = 1024

# Of a file, on every usual file system.
_MAX_NAME_BYTES = 255

# Bits of an element in raw data, by TensorProto.DataType; onnx 1.17 does not know all of them.
_BITS = {1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128, 16: 16}
_BITS |= dict.fromkeys((17, 18, 19, 20, 24), 8) | dict.fromkeys((21, 22, 23), 4) | dict.fromkeys((25, 26), 2)


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, all its tensor data loaded.

    Attributes:
        proto: the model; the caller may change it.
        path: the file it came from, None for a model that was handed over in memory.
        size_bytes: bytes of the file and of its external data.
        external: whether it kept tensors in an external file.
    """

    proto: ModelProto
    path: Path | None
    size_bytes: int
    external: bool


def load(source: str | Path | ModelProto) -> LoadedModel:
    """Read and check a model.

    Args:
        source: a file, or a model in memory, which is copied.

    Raises:
        ModelError: the file cannot be read, is no ONNX model, or breaks a rule of ONNX.
    """
    if isinstance(source, ModelProto):
        proto = ModelProto()
        proto.CopyFrom(source)
        if not _names_are_text(proto):
            raise ModelError("the model is not valid ONNX: a name in it is not UTF-8")
        if any(uses_external_data(t) for t in iterate_tensors(proto)):
            raise ModelError("the model's data are in another file: load them, or give the model's path")
        _respell(proto)
        _require_one_opset(proto, "the model")
        _check_proto(proto, "the model")
        return LoadedModel(proto, None, tensor_bytes(proto), external=False)
    path = Path(source)
    require_text_name(path)
    proto, size = _parse(path)
    outside = [(t, _location(t)) for t in iterate_tensors(proto) if uses_external_data(t)]
    if outside and is_special(path):
        raise ModelError(f"{path} is no file, and the model's data are in another one beside it: name the model's file")
    try:
        respelled = _respell(proto)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    _require_one_opset(proto, str(path))
    # What was read from a pipe is there no more.
    is_as_read = not respelled and not is_special(path)
    try:
        if is_as_read:
            onnx.checker.check_model(str(path))
        load_external_data_for_model(proto, str(path.parent))
    except Exception as error:  # the checker and the loader raise many types, RuntimeError and ValueError among them
        raise ModelError(f"{path}: {_why_invalid(error, path, [location for _, location in outside])}") from error
    if not is_as_read:
        _check_proto(proto, str(path))
    for tensor, location in outside:
        _check_data(tensor, location, path)
    files = {path.parent / location for _, location in outside}
    return LoadedModel(proto, path, size + sum(f.stat().st_size for f in files), external=bool(outside))


def _why_invalid(error: Exception, path: Path, locations: Sequence[str]) -> str:
    missing = next((name for name in locations if _is_beside(name) and not is_there(path.parent / name)), "")
    link = next((location for location in locations if is_link(path.parent / location)), "")
    if link:
        return f"its data {link} is a symbolic link, which onnx does not follow: copy both files (cp -L)"
    if missing:
        return f"its data file {missing} is missing: keep it beside the model"
    return f"is not valid ONNX: {one_line(error)}"


def save(proto: ModelProto, path: str | Path, *, external: bool = False) -> int:
    """Check a model and write it, whole or not at all.

    Args:
        proto: the model, all its data loaded; it is the same afterwards.
        path: the file to write; its directory exists. External data goes into ``<name>.data`` beside it.
        external: keep tensors in an external file even if they would fit into the model's.

    Returns:
        Bytes written, external data included.

    Raises:
        ModelError: the model breaks a rule of ONNX or cannot be written, or the file for its external data is there
            and no part of the model that is replaced. Nothing is left behind.
    """
    given = path
    require_text_name(given)
    external = external or tensor_bytes(proto) > MAX_INLINE_BYTES
    if is_special(path):
        return _save_to_special(proto, Path(path), external)
    try:
        path = resolved(path)  # a link keeps being one: its target is replaced
    except OSError as error:
        raise ModelError(f"{given}: cannot be written: {error.strerror or error}") from error
    data = path.with_name(data_name(path))
    if external and len(os.fsencode(data.name)) > _MAX_NAME_BYTES:
        raise ModelError(f"{given}: cannot be written: the name of {data.name} beside it would be too long")
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name[:200]}.", dir=path.parent, ignore_cleanup_errors=True
        ) as temporary:
            written = _write_into(proto, Path(temporary), path.name, external)
            if any(f.name == data.name for f in written) and is_there(data) and data not in data_files(path):
                raise ModelError(f"{data} is there and may be another model's: remove it, or give {given} another name")
            size = sum(f.stat().st_size for f in written)
            # Data first: a model file never points at data that is not there.
            _move_all(sorted(written, key=lambda f: f.name == path.name), path.parent, Path(temporary) / "old")
    except OSError as error:
        raise ModelError(f"{given}: cannot be written: {error.strerror or error}") from error
    return size


def _save_to_special(proto: ModelProto, path: Path, external: bool) -> int:
    if external:
        raise ModelError(f"{path} is no file, and the model needs one for its data beside its own: name a file")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            (written,) = _write_into(proto, Path(temporary), "model.onnx", external=False)
            pass_on(written, path)
            return written.stat().st_size
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror or error}") from error


def data_name(path: Path) -> str:
    """Name of the file, beside a model's, into which `save` puts external data."""
    return f"{path.name}.data"


def data_files(path: Path) -> list[Path]:
    """The files beside a model that hold its external data, there or not; none of what is no model.

    What a model names elsewhere no reader takes, so it is left out: absolute paths, and those that lead upwards.
    """
    if is_special(path):  # a pipe is read once
        return []
    try:
        proto = onnx.load_model(str(path), "protobuf", load_external_data=False)  # whatever its name ends in
    except (DecodeError, ValueError, OSError):
        return []
    entries = [e for t in iterate_tensors(proto) if uses_external_data(t) for e in t.external_data]
    locations = sorted({entry.value for entry in entries if entry.key == "location"})
    return [path.parent / name for name in locations if _is_beside(name)]


def _is_beside(location: str) -> bool:
    """Whether external data are where a reader takes them from: in the model's folder, or in one within it."""
    return not Path(location).is_absolute() and ".." not in Path(location).parts


def one_line(error: BaseException) -> str:
    """The first lines of an error's message that say something, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__


def tensor_bytes(proto: ModelProto) -> int:
    """Bytes of a model's tensors: close to its size, and without protobuf's limit of 2 GB."""
    return sum(_data_bytes(tensor) for tensor in iterate_tensors(proto))


def iterate_tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """All tensors of a model: initializers and attributes, in the graph, its subgraphs and its functions."""
    yield from _graph_tensors(proto.graph)
    for function in proto.functions:
        yield from _node_tensors(function.node)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: onnx.NodeProto) -> Iterator[TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("g"):
                yield from _graph_tensors(attribute.g)
            for graph in attribute.graphs:
                yield from _graph_tensors(graph)


def _data_bytes(tensor: TensorProto) -> int:
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data)
    return 4 * (len(tensor.float_data) + len(tensor.int32_data)) + 8 * (
        len(tensor.int64_data) + len(tensor.double_data) + len(tensor.uint64_data)
    )


def _parse(path: Path) -> tuple[ModelProto, int]:
    """The model in a file, and how many bytes it has there."""
    try:
        data = read_special(path, _MAX_FILE_BYTES + 1) if is_special(path) else path.read_bytes()
    except IsADirectoryError as error:
        raise ModelError(f"{path}: is a folder: name the models in it, such as {path / '*.onnx'}") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise ModelError(f"{path}: is not an ONNX model: it has more bytes than protobuf can read, 2 GB")
    try:
        proto = onnx.load_model_from_string(data)
    except (DecodeError, ValueError) as error:
        raise ModelError(f"{path}: is not an ONNX model, or is cut off ({one_line(error)})") from error
    if not _names_are_text(proto):
        raise ModelError(f"{path}: is not an ONNX model: a name in it is not UTF-8")
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(f"{path}: is not an ONNX model: it has no graph or names no opset")
    return proto, len(data)


def _check_proto(proto: ModelProto, name: str) -> None:
    try:
        onnx.checker.check_model(proto)
    except Exception as error:
        raise ModelError(f"{name}: is not valid ONNX: {one_line(error)}") from error


def _require_one_opset(proto: ModelProto, name: str) -> None:
    """ONNX Runtime takes one of several versions, and what is written for it may mean the other."""
    versions = sorted({o.version for o in proto.opset_import if not o.domain})
    if len(versions) > 1:
        listed = " and ".join(map(str, versions))
        raise ModelError(f"{name}: imports ONNX's own operators in the versions {listed}: keep one of them")


def _respell(proto: ModelProto) -> bool:
    """Write what ONNX Runtime takes as onnx's checker wants it; return whether anything was written otherwise."""
    changes = [
        _spell_default_domain(proto),
        name_graph(proto),
        name_apart(proto),
        *(sort_nodes(owner) for owner in (proto.graph, *proto.functions)),
        state_output_shapes(proto),
    ]
    return any(changes)


def _spell_default_domain(proto: ModelProto) -> bool:
    """Write the default domain as "" where the model writes it as ``ai.onnx``; return whether it does.

    Both are allowed and ONNX Runtime takes both, but onnx's own checker knows only the first.
    """
    graphs = [proto.graph, *(g for t in proto.training_info for g in (t.initialization, t.algorithm))]
    nodes = [n for owner in (*graphs, *proto.functions) for n in iterate_nodes(owner.node)]
    imports = [o for owner in (proto, *proto.functions) for o in owner.opset_import]
    spelled = [item for item in (*nodes, *imports) if item.domain == "ai.onnx"]
    for item in spelled:
        item.domain = ""
    return bool(spelled)


def _names_are_text(message: Message) -> bool:
    """Whether all strings but documentation are UTF-8; protobuf gives bytes where one is not, and refuses to set it."""
    for field in message.DESCRIPTOR.fields:
        if field.type not in (field.TYPE_MESSAGE, field.TYPE_STRING) or field.name == "doc_string":
            continue
        value = getattr(message, field.name)
        if isinstance(value, Message):
            values = [value] if message.HasField(field.name) else []
        else:
            values = [value] if isinstance(value, (str, bytes)) else list(value)
        if any(isinstance(v, bytes) or (isinstance(v, Message) and not _names_are_text(v)) for v in values):
            return False
    return True


def _location(tensor: TensorProto) -> str:
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def _check_data(tensor: TensorProto, location: str, path: Path) -> None:
    """Check that the external file held as much as the tensor needs; onnx does not."""
    wanted = -(-math.prod(tensor.dims) * _BITS[tensor.data_type] // 8) if tensor.data_type in _BITS else 0
    if len(tensor.raw_data) < wanted:
        raise ModelError(
            f"{path}: tensor {tensor.name!r} needs {wanted} bytes, {location} has {len(tensor.raw_data)} for it"
        )
    if 0 < wanted < len(tensor.raw_data):
        tensor.raw_data = tensor.raw_data[:wanted]  # an entry without a length stands for the rest of the file


def _initializers(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """Those of a graph and of its subgraphs."""
    yield from graph.initializer
    for node in iterate_nodes(graph.node):
        for inner in subgraphs(node):
            yield from inner.initializer


def _write_into(proto: ModelProto, directory: Path, name: str, external: bool) -> list[Path]:
    """Write the model's file, and its data file if there is one, into ``directory``; check them; return them."""
    target = directory / name
    try:
        if external:
            # Not by onnx's own function, which looks for a file of that name in the current directory, and refuses.
            for tensor in _initializers(proto.graph):
                if tensor.HasField("raw_data") and len(tensor.raw_data) >= MIN_EXTERNAL_BYTES:
                    set_external_data(tensor, data_name(target))
            onnx.save_model(proto, str(target))
            for file in directory.iterdir():  # of the data, onnx lets nobody but the owner read them
                file.chmod(target.stat().st_mode)
            load_external_data_for_model(proto, str(directory))
            _forget_external_location(proto)
        else:
            target.write_bytes(proto.SerializeToString())
        onnx.checker.check_model(str(target))
    except (EncodeError, ValueError, RuntimeError, onnx.checker.ValidationError) as error:
        raise ModelError(f"{name}: the model to be written is not valid ONNX: {one_line(error)}") from error
    return list(directory.iterdir())


def _move_all(files: list[Path], directory: Path, aside: Path) -> None:
    """Move files into a directory; when one cannot be moved, put back what the ones before it had replaced."""
    aside.mkdir()
    moved: list[Path] = []
    try:
        for file in files:
            target = directory / file.name
            if target.is_file() and file is not files[-1]:
                os.link(target, aside / file.name)
            file.replace(target)
            moved.append(target)
    except OSError:
        for target in moved:
            old = aside / target.name
            if old.exists():
                old.replace(target)
            else:
                target.unlink()
        raise


def _forget_external_location(proto: ModelProto) -> None:
    for tensor in iterate_tensors(proto):
        if tensor.external_data:
            del tensor.external_data[:]
            tensor.ClearField("data_location")
