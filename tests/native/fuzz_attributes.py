"""Feeds nodes with mutated attributes to the native library: each is refused or runs, and none may crash the process.

    python tests/native/fuzz_attributes.py [--count 1000] [--seed 0]

Seeded: the same seed gives the same models. The number of each model goes to stderr before it is tried, so that after a
crash the last one names the culprit (``--first N --count 1`` tries it alone).
"""

from __future__ import annotations

import argparse
import collections
import os

import numpy as np
from onnx import AttributeProto, helper, numpy_helper

from onnx_sparseconv.custom_ops.schema import Activation, ConvGeometry, PoolGeometry
from tests.support.sparse_models import (
    SparseConvCase,
    geometry_2d,
    make_model,
    make_session,
    random_inputs,
    random_weight,
    supported_isas,
)

HALF = np.dtype(np.float16)
CASES = (
    (
        SparseConvCase(random_weight((8, 6, 3, 3), 0.4), geometry_2d(), Activation.CLIP, -1, 1, slice_height=2),
        (2, 6, 9, 7),
    ),
    (SparseConvCase(random_weight((6, 2, 4), 0.5), ConvGeometry((4,), (2,), (1, 2), (3,), 3), dtype=HALF), (1, 6, 40)),
    (
        SparseConvCase(random_weight((4, 3, 2, 2, 2), 0.5), ConvGeometry((2,) * 3, (1,) * 3, (0,) * 6, (1,) * 3)),
        (1, 3, 5, 6, 7),
    ),
    (
        SparseConvCase(random_weight((9, 5, 1, 1), 0.5), geometry_2d(1, 1, 0), Activation.SILU, has_residual=True),
        (1, 5, 8, 8),
    ),
    (
        SparseConvCase(random_weight((4, 4, 3, 3), 0.5), ConvGeometry((3, 3), (2, 2), (), (1, 1), 1, "SAME_LOWER")),
        (1, 4, 9, 9),
    ),
    (
        SparseConvCase(
            random_weight((5, 4, 3, 3), 0.5), geometry_2d(), pool=PoolGeometry((3, 2), (2, 1), (1, 0, 2, 1))
        ),
        (2, 4, 6, 9),
    ),
)
INTEGERS = (
    -(2**63),
    -(2**31),
    -1,
    0,
    1,
    2,
    3,
    4,
    5,
    8,
    255,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
)
# Not the ones that are allowed but ask for an output of gigabytes: that is a matter of memory, not of attributes.
PADS = tuple(value for value in INTEGERS if value < 1000 or value > 2**31 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 3e38, 1e-45)
STRINGS = (b"", b"NOTSET", b"SAME_UPPER", b"SAME_LOWER", b"VALID", b"same_upper", b"\xff\xfe\x00x", b"S" * 4000)
DTYPES = (np.float32, np.float16, np.float64, np.int8, np.uint8, np.int32, np.int64, np.uint16, np.uint32, np.bool_)


def mutate_array(array, rng):
    """One of: another dtype, another length, other values, other bytes, another shape."""
    flat = array.reshape(-1)
    match rng.integers(6):
        case 0:
            with np.errstate(all="ignore"):
                return array.astype(rng.choice(np.array(DTYPES, object)))
        case 1:
            return flat[: rng.integers(flat.size + 1)]
        case 2:
            return np.concatenate([flat, flat[: 1 + rng.integers(4)], flat])
        case 3 if flat.size:
            changed = array.copy().reshape(-1)
            for _ in range(1 + rng.integers(3)):
                with np.errstate(all="ignore"):
                    value = rng.choice(FLOATS) if array.dtype.kind == "f" else rng.choice(np.array(INTEGERS, object))
                    changed[rng.integers(changed.size)] = np.array(value).astype(array.dtype)
            return changed.reshape(array.shape)
        case 4:
            return np.frombuffer(rng.bytes(array.nbytes), array.dtype).reshape(array.shape)
        case _:
            return flat.reshape((1,) * int(rng.integers(1, 4)) + flat.shape)


def mutate_tensor(tensor, rng):
    """Breaks the tensor itself: its bytes no longer fit its sizes."""
    match rng.integers(4):
        case 0:
            tensor.raw_data = tensor.raw_data[: rng.integers(len(tensor.raw_data) + 1)]
        case 1:
            tensor.raw_data += rng.bytes(1 + int(rng.integers(9)))
        case 2:
            # Not a huge one: ONNX Runtime believes it and asks for the memory, at which AddressSanitizer stops.
            tensor.dims.append(int(rng.choice([value for value in INTEGERS if value < 1000])))
        case _:
            tensor.data_type = int(rng.integers(0, 24))
    return tensor


def mutate_list(values, rng, allowed):
    def draw():
        return int(rng.choice(np.array(allowed, object)))

    match rng.integers(3):
        case 0:
            return values[: rng.integers(len(values) + 1)]
        case 1:
            return [*values, draw()]
        case _:
            return [draw() if rng.random() < 0.6 else value for value in values]


def other_type(name, rng):
    """An attribute of some other type than the right one, most likely."""
    values = (1, 1.0, b"text", [1, 2], [1.0, 2.0], [b"a", b"b"], numpy_helper.from_array(np.ones(3, np.float32)))
    return helper.make_attribute(name, values[rng.integers(len(values))])


def mutate(attributes, rng):
    """Mutates one to three attributes; the result is fit for `make_model`."""
    attributes = dict(attributes)
    for _ in range(1 + rng.integers(3)):
        name = rng.choice(sorted(attributes))
        value = attributes[name]
        kind = rng.random()
        if kind < 0.08:
            del attributes[name]
            if not attributes:
                break
        elif kind < 0.16 or isinstance(value, AttributeProto):
            attributes[name] = other_type(name, rng)
        elif isinstance(value, np.ndarray):
            changed = np.asarray(mutate_array(value, rng))
            attributes[name] = changed
            if kind > 0.85:
                attributes[name] = helper.make_attribute(name, mutate_tensor(numpy_helper.from_array(changed), rng))
        elif isinstance(value, str | bytes):
            attributes[name] = STRINGS[rng.integers(len(STRINGS))]
        elif isinstance(value, list):
            changed = mutate_list(value, rng, PADS if name == "pads" else INTEGERS)
            # helper.make_attribute cannot tell the type of an empty list.
            attributes[name] = changed or AttributeProto(name=name, type=AttributeProto.INTS)
        elif isinstance(value, float):
            attributes[name] = float(rng.choice(FLOATS))
        else:
            attributes[name] = int(rng.choice(np.array(INTEGERS, object)))
    return attributes


def try_model(number, seed):
    """Creates a session for mutant ``number`` and, if that works, runs it. Returns what happened."""
    rng = np.random.default_rng([seed, number])
    case, x_shape = CASES[number % len(CASES)]
    attributes = mutate(case.attributes(), rng)
    # With and without fixed sizes, since shape inference sees the attributes first.
    model = make_model(case, attributes, x_shape if rng.random() < 0.5 else None)
    try:
        isas = supported_isas()
        session = make_session(model, cpu_isa=isas[rng.integers(len(isas))], threads=1 + int(rng.integers(2)))
    except Exception as error:
        return "refused" if "SparseConv" in str(error) else "refused by ONNX Runtime"
    try:
        session.run(None, random_inputs(case, x_shape))
    except Exception:
        return "refused when run"
    return "ran"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    outcomes = collections.Counter()
    for number in range(arguments.first, arguments.first + arguments.count):
        os.write(2, b"%d\n" % number)
        outcomes[try_model(number, arguments.seed)] += 1
    print(*(f"{outcome}: {count}" for outcome, count in sorted(outcomes.items())), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
