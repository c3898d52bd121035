"""All passes together on chains made at random: whatever stands around a convolution, the outputs stay the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, NodeProto

from tests.support.odd_models import pruned
from tests.support.pass_models import CHANNELS, INPUT, build, checked, node

SCALES = ("Mul", "Div", "BatchNormalization")
SHIFTS = ("Add", "Sub", "Sub from")
NOTHING = ("Identity", "Dropout")
ACTIVATIONS = ("Relu", "Clip", "LeakyRelu", "HardSigmoid", "Sigmoid", "HardSwish", "SiLU", "spelled HardSwish")
BEFORE = (*SCALES, *SHIFTS, *NOTHING, "Pad", "per element", "Relu")
AFTER = (*SCALES, *SHIFTS, *NOTHING, *ACTIVATIONS, "residual", "residual", "per element", "Conv")


@dataclass(frozen=True)
class Chain:
    """What stands before and after a convolution, and what else reads what lies between.

    Attributes:
        before: operators on its input.
        after: operators on its output.
        tapped: positions of the chain whose result is also an output of the model.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    tapped: frozenset[int]
    group: int
    padded: bool
    bias: bool
    opset: int
    seed: int


@dataclass
class Writer:
    """Nodes and constants of a chain, as they are written."""

    chain: Chain
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    taps: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"X": INPUT})
    last: str = "X"

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.chain.seed)

    def constant(self, values: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(values)
        return name

    def add(self, op: str, inputs: list[str], **attributes: Any) -> str:
        output = f"t{len(self.nodes)}"
        self.nodes.append(node(op, inputs, output, **attributes))
        self.shapes[output] = self.shapes[self.last]
        self.last = output
        return output

    def numbers(self, *shape: int) -> np.ndarray[Any, Any]:
        """Numbers about 1, of both signs, some of them for all channels."""
        values = self.rng.uniform(0.7, 1.4, shape) * self.rng.choice([-1, 1], shape)
        return values.astype(np.float32)

    def by_channel(self) -> str:
        return self.constant(self.numbers(*[(CHANNELS, 1, 1), (1, CHANNELS, 1, 1), ()][self.rng.integers(3)]))

    def write(self, op: str) -> None:
        x = self.last
        if op in ("Mul", "Add", "Div", "Sub"):
            self.add(op, [x, self.by_channel()])
        elif op == "Sub from":
            self.add("Sub", [self.by_channel(), x])
        elif op == "BatchNormalization":
            parameters = [self.numbers(CHANNELS) for _ in range(3)] + [np.abs(self.numbers(CHANNELS))]
            self.add(op, [x, *(self.constant(p) for p in parameters)])
        elif op == "per element":
            self.add("Add", [x, self.constant(self.numbers(*self.shapes[x][1:]))])
        elif op == "Pad":
            self.add(op, [x, self.constant(np.array([0, 0, 1, 0, 0, 0, 0, 2]))])
            height, width = self.shapes[x][2:]
            self.shapes[self.last] = (*self.shapes[x][:2], height + 1, width + 2)
        elif op == "residual":
            source = next((n for n in reversed(self.shapes) if n != x and self.shapes[n] == self.shapes[x]), x)
            self.add("Add", [x, source] if self.rng.integers(2) else [source, x])
        elif op == "Conv":
            self.convolve()
        elif op == "Clip":
            self.add(op, [x, self.constant(np.float32(-0.5)), self.constant(np.float32(0.75))])
        elif op == "SiLU":
            self.add("Mul", [x, self.add("Sigmoid", [x])])
        elif op == "spelled HardSwish":
            shifted = self.add("Add", [x, self.constant(np.float32(3))])
            gate = self.add("Clip", [shifted, self.constant(np.float32(0)), self.constant(np.float32(6))])
            self.add("Div", [self.add("Mul", [x, gate]), self.constant(np.float32(6))])
        else:
            self.add(op, [x])

    def convolve(self) -> None:
        per_group = CHANNELS // self.chain.group
        weight = pruned((CHANNELS, per_group, 3, 3), 0.6, seed=self.chain.seed) / np.float32(per_group)
        inputs = [self.last, self.constant(weight)]
        if self.chain.bias:
            inputs.append(self.constant(self.numbers(CHANNELS)))
        pad = int(self.chain.padded)
        source = self.shapes[self.last]
        self.add("Conv", inputs, pads=[pad] * 4, group=self.chain.group)
        self.shapes[self.last] = (*source[:2], *(size - 2 + 2 * pad for size in source[2:]))


def make(chain: Chain) -> ModelProto:
    writer = Writer(chain)
    for position, op in enumerate((*chain.before, "Conv", *chain.after, "Neg")):
        if op == "Conv" and min(writer.shapes[writer.last][2:]) < 3:
            continue
        writer.write(op)
        if position in chain.tapped and op != "Neg":
            writer.taps.append(writer.last)
    writer.nodes[-1].output[0] = "Y"
    outputs = ["Y", *dict.fromkeys(writer.taps)]
    return build(writer.nodes, writer.constants, outputs=outputs, opset=chain.opset)


chains = st.builds(
    Chain,
    before=st.lists(st.sampled_from(BEFORE), max_size=3).map(tuple),
    after=st.lists(st.sampled_from(AFTER), max_size=5).map(tuple),
    tapped=st.frozensets(st.integers(0, 8), max_size=1),
    group=st.sampled_from([1, 2]),
    padded=st.booleans(),
    bias=st.booleans(),
    opset=st.sampled_from([14, 18, 21]),
    seed=st.integers(0, 2**16),
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(chain=chains)
def test_outputs_stay_the_same(chain: Chain) -> None:
    proto = make(chain)
    # A Div by a number below 1 after another, a dozen layers: magnitudes grow, and the bound grows with them.
    converted, report = checked(proto, tolerance=3e-5)
    assert report.nodes_after == len(converted.graph.node) <= report.nodes_before
    assert len({n.name for n in converted.graph.node}) == len(converted.graph.node)
