"""The inputs of a run: read from a file, or made up from the model's own description of them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onnx_sparseconv.errors import ModelError, UsageError
from onnx_sparseconv.files import OutputError, is_there

if TYPE_CHECKING:
    import onnxruntime as ort

Array = NDArray[Any]
Shape = tuple[int, ...]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(int16)": np.dtype(np.int16),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(uint8)": np.dtype(np.uint8),
    "tensor(uint16)": np.dtype(np.uint16),
    "tensor(uint32)": np.dtype(np.uint32),
    "tensor(uint64)": np.dtype(np.uint64),
    "tensor(bool)": np.dtype(np.bool_),
    "tensor(string)": np.dtype(np.str_),
}
_BATCH_NAMES = ("n", "b", "batch", "batchsize", "batch_size", "bs", "num_images", "unk__0")
# Larger arrays of made-up numbers repeat so many (a prime, so that no two rows or images are alike): making numbers
# takes longer than the runs that they are for.
_MOST_NUMBERS = 16_777_259
# Bytes of a name in a zip file, at most.
_MAX_NAME = (1 << 16) - 1
# Made-up inputs above this size are an accident, not a wish.
_MAX_BYTES = 1 << 33


@dataclass(frozen=True)
class ModelInput:
    """One input that a caller has to give.

    Attributes:
        name: its name.
        type: ONNX Runtime's name of the type, such as ``tensor(float)``.
        shape: one entry a dimension: a size, the name of a symbolic one, or None where nothing is known.
    """

    name: str
    type: str
    shape: tuple[int | str | None, ...]

    @property
    def text(self) -> str:
        """The input and its shape as a person writes it."""
        dims = " x ".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name} ({self.type}, {dims or 'scalar'})"


def model_inputs(session: ort.InferenceSession) -> tuple[ModelInput, ...]:
    """Inputs that a session needs. Those that are also initializers keep their default and are not listed."""
    return tuple(ModelInput(i.name, i.type, tuple(i.shape or ())) for i in session.get_inputs())


def in_types_of(session: ort.InferenceSession, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays as a session takes them: rounded to float16 where it wants that and they are float."""
    halves = {i.name for i in model_inputs(session) if i.type == "tensor(float16)"}
    return {n: a.astype(np.float16) if n in halves and a.dtype == np.float32 else a for n, a in arrays.items()}


def parse_shape(text: str) -> tuple[str, Shape]:
    """Parse ``NAME:1x3x224x224``. The name may hold colons itself; ``NAME:`` is a scalar.

    Raises:
        UsageError: the text has another form.
    """
    name, colon, dims = text.rpartition(":")
    try:
        shape = tuple(int(d) for d in dims.lower().split("x")) if dims else ()
    except ValueError:
        shape = (-1,)
    if not name or not colon or any(d < 0 for d in shape):
        raise UsageError(f"{text!r} is not a shape: write NAME:1x3x224x224")
    return name, shape


def parse_shapes(texts: Sequence[str]) -> dict[str, Shape]:
    """Parse several shapes; each input may be named once."""
    shapes: dict[str, Shape] = {}
    for name, shape in map(parse_shape, texts):
        if shapes.setdefault(name, shape) != shape:
            raise UsageError(f"two different shapes for input {name!r}")
    return shapes


def load_inputs(path: str | Path, inputs: Sequence[ModelInput]) -> dict[str, Array]:
    """Read the inputs of a model from an ``.npz`` file and check names, types and shapes.

    Raises:
        ModelError: the file cannot be read, or does not fit the model.
    """
    arrays = read_npz(path)
    check_inputs(arrays, inputs, str(path))
    return arrays


def read_npz(path: str | Path) -> dict[str, Array]:
    """All arrays of an ``.npz`` file by name; nothing in it is executed (no pickles).

    Raises:
        ModelError: it is not such a file.
    """
    if not is_there(path):
        raise ModelError(f"{path}: no such file")
    try:
        # numpy leaves a file open that it opened itself and then cannot read.
        with Path(path).open("rb") as stream:
            loaded = _load(stream, path)
            if isinstance(loaded, np.lib.npyio.NpzFile):
                return {name: _array(loaded, name) for name in loaded.files}
    except ModelError:
        raise
    except Exception as error:  # zipfile passes on what its decompressors raise, and numpy does so of what is no array
        raise ModelError(f"{path}: not a readable .npz file of plain arrays ({error})") from error
    raise ModelError(f"{path}: one array without a name; inputs come from numpy.savez(path, name=array)")


def _load(stream: IO[bytes], path: str | Path) -> Any:  # noqa: ANN401
    try:
        return np.load(stream, allow_pickle=False)
    except (ValueError, EOFError) as error:
        # numpy takes all that it does not know for pickles, and says how to load these.
        raise ModelError(f"{path}: is no .npz file; numpy.savez(path, name=array) writes one") from error


def _array(loaded: Mapping[str, Array], name: str) -> Array:
    try:
        array = loaded[name]
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise ValueError(f"{name!r} holds Python objects") from error
        raise
    if not isinstance(array, np.ndarray):  # numpy gives the bytes of what is no array
        raise ValueError(f"{name!r} is no array")
    return array


def write_npz(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays under any names (``numpy.savez`` refuses some) as an uncompressed ``.npz``.

    Raises:
        OutputError: no such file can hold one of the names.
    """
    for name in arrays:
        if "\0" in name or len(f"{name}.npy".encode()) > _MAX_NAME:
            raise OutputError(f"an .npz file cannot hold an array named {name[:40]!r}: rename that output of the model")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as file:
        for name, array in arrays.items():
            plain = array.astype(np.str_) if array.dtype == object else array
            with file.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asanyarray(plain), allow_pickle=False)


def check_inputs(arrays: Mapping[str, Array], inputs: Sequence[ModelInput], source: str) -> None:
    """Check arrays against a model's inputs.

    Raises:
        ModelError: names what was wanted and what was given.
    """
    wanted = {i.name for i in inputs}
    if missing := sorted(wanted - arrays.keys()):
        raise ModelError(
            f"{source}: no array for input {', '.join(missing)}; it holds {', '.join(sorted(arrays)) or 'nothing'}"
        )
    if unknown := sorted(arrays.keys() - wanted):
        raise ModelError(
            f"{source}: the model has no input {', '.join(unknown)}; it has {', '.join(sorted(wanted)) or 'none'}"
        )
    for model_input in inputs:
        _check_array(arrays[model_input.name], model_input, source)


def _check_array(array: Array, model_input: ModelInput, source: str) -> None:
    dtype = _dtype(model_input)
    same_kind = array.dtype.kind in "UO" if dtype.kind == "U" else array.dtype == dtype
    if not same_kind:
        raise ModelError(f"{source}: input {model_input.text} needs {dtype}, got {array.dtype}")
    fits = len(array.shape) == len(model_input.shape) and all(
        not isinstance(wanted, int) or wanted == got for wanted, got in zip(model_input.shape, array.shape, strict=True)
    )
    if model_input.shape and not fits:
        raise ModelError(f"{source}: input {model_input.text} got an array of shape {_dims(array.shape)}")


def _dtype(model_input: ModelInput) -> np.dtype[Any]:
    try:
        return DTYPES[model_input.type]
    except KeyError:
        raise ModelError(f"input {model_input.name}: type {model_input.type} cannot be given from numpy") from None


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def resolve_shapes(
    inputs: Sequence[ModelInput], shapes: Mapping[str, Shape] | None = None, batch: int | None = None
) -> dict[str, Shape]:
    """Decide the shape of every input.

    1. ``shapes`` decides for the inputs that it names, and for every other dimension that bears the same symbolic name.
    2. An unknown first dimension of an input of two or more dimensions (or of one with a name such as ``batch``) is the
       batch size.
    3. Any other unknown dimension is an error: guessing it would time or test something that nobody asked about.

    Args:
        inputs: the model's inputs.
        shapes: shapes given by name.
        batch: batch size; None: 1, where the model does not fix it.

    Raises:
        UsageError: a shape is missing or contradicts the model.
    """
    given = dict(shapes or {})
    if unknown := sorted(given.keys() - {i.name for i in inputs}):
        known = ", ".join(i.text for i in inputs) or "none"
        raise UsageError(f"--shape: the model has no input {', '.join(unknown)}; it has {known}")
    if batch is not None and batch < 1:
        raise UsageError(f"--batch must be at least 1, got {batch}")
    symbols: dict[str, int] = {}
    for model_input in inputs:
        if model_input.name in given:
            _check_given(model_input, given[model_input.name], symbols)
    return {i.name: given[i.name] if i.name in given else _resolve(i, symbols, batch) for i in inputs}


def _check_given(model_input: ModelInput, shape: Shape, symbols: dict[str, int]) -> None:
    """Check a given shape against the model's, and note what it says of symbolic dimensions."""
    if not model_input.shape:
        return
    fits = len(shape) == len(model_input.shape) and all(
        not isinstance(wanted, int) or wanted == got for wanted, got in zip(model_input.shape, shape, strict=True)
    )
    if not fits:
        raise UsageError(f"--shape {model_input.name}:{_dims(shape)} does not fit the model's {model_input.text}")
    for wanted, got in zip(model_input.shape, shape, strict=True):
        if isinstance(wanted, str) and wanted:
            symbols.setdefault(wanted, got)


def _resolve(model_input: ModelInput, symbols: Mapping[str, int], batch: int | None) -> Shape:
    dims: list[int] = []
    for axis, dim in enumerate(model_input.shape):
        is_batch = axis == 0 and _is_batch(model_input)
        if isinstance(dim, int) and dim >= 0:
            if is_batch and batch is not None and dim != batch and len(model_input.shape) >= 3:
                raise UsageError(f"--batch {batch}: the model fixes the batch size of {model_input.text}")
            dims.append(dim)
        elif isinstance(dim, str) and dim in symbols:
            dims.append(symbols[dim])
        elif is_batch:
            dims.append(batch or 1)
        else:
            rank = len(model_input.shape)
            example = ":" + _dims([*dims, *(_example(d, rank) for d in model_input.shape[axis:])])
            raise UsageError(
                f"the model leaves dimension {axis} of input {model_input.text} open: give it, as in "
                f"--shape {model_input.name}{example}"
            )
    return tuple(dims)


def _is_batch(model_input: ModelInput) -> bool:
    first = model_input.shape[0]
    return len(model_input.shape) >= 2 or (isinstance(first, str) and first.lower() in _BATCH_NAMES)


def _example(dim: int | str | None, rank: int) -> int:
    """A size for an error message: images are likely to have four dimensions, signals fewer."""
    if isinstance(dim, int) and dim >= 0:
        return dim
    return 224 if rank >= 4 else 16000


def require_elements(shapes: Mapping[str, Shape]) -> None:
    """Check that every input has elements: a run of none says nothing about speed.

    Raises:
        UsageError: one is empty; names it.
    """
    for name, shape in shapes.items():
        if 0 in shape:
            raise UsageError(
                f"input {name} is empty ({_dims(shape)}), so there is nothing to time: give sizes from 1 on"
            )


def check_seed(seed: int) -> None:
    """Raises UsageError where it is none for random inputs."""
    if seed < 0:
        raise UsageError(f"the seed must be at least 0, got {seed}")


def make_random_inputs(inputs: Sequence[ModelInput], shapes: Mapping[str, Shape], seed: int = 0) -> dict[str, Array]:
    """Inputs from a seeded generator, the same on every machine.

    Floating-point numbers are normally distributed (mean 0, deviation 1). uint8 covers its whole range, as pixels do.
    Other integers are 0 or 1, because they are often indices or lengths; booleans are either; strings are ``a`` or
    ``b``. Large arrays of floating-point numbers repeat the first 16,777,259 of them.
    """
    generator = np.random.default_rng(seed)
    return {i.name: _random_array(_dtype(i), shapes[i.name], generator, i) for i in inputs}


def _random_array(dtype: np.dtype[Any], shape: Shape, generator: np.random.Generator, model_input: ModelInput) -> Array:
    size_bytes = int(np.prod(shape, dtype=object)) * max(dtype.itemsize, 1)
    if size_bytes > _MAX_BYTES:
        raise UsageError(f"input {model_input.text} of shape {_dims(shape)} would take {size_bytes} bytes")
    if dtype.kind == "f":
        size = int(np.prod(shape, dtype=np.int64))
        numbers = generator.standard_normal(min(size, _MOST_NUMBERS)).astype(dtype)
        return np.resize(numbers, shape)
    if dtype.kind == "U":
        return np.asarray(generator.choice(np.asarray(["a", "b"], object), shape), object)
    top = 256 if dtype == np.uint8 else 2
    return np.asarray(generator.integers(0, top, shape)).astype(dtype)
