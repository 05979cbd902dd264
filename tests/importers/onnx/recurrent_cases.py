"""LSTM, GRU and RNN of ONNX: every option, alone and with others."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from tests.importers.onnx.case import Case
from tests.importers.onnx.graphs import FEATURES, Net

HIDDEN = 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
TIME_MAJOR = (1, 0, 2)
ACTIVATIONS = (
    *("Affine", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "ScaledTanh", "Sigmoid", "Softplus", "Softsign", "Tanh"),
    "ThresholdedRelu",
)
WITH_ALPHA = ("Affine", "Elu", "HardSigmoid", "LeakyRelu", "ScaledTanh", "ThresholdedRelu")
WITH_BETA = ("Affine", "HardSigmoid", "ScaledTanh")


def node(
    net: Net,
    kind: str,
    x: str = "x",
    inputs: int = FEATURES,
    *,
    bias: bool = True,
    lengths: str = "",
    start: bool = False,
    peepholes: bool = False,
    direction: str = "forward",
    scale: float = 0.5,
    **attributes: Any,
) -> str:
    """Add a node with random weights; return its first output."""
    directions, gates = 2 if direction == "bidirectional" else 1, GATES[kind]
    shapes = (directions, gates * HIDDEN, inputs), (directions, gates * HIDDEN, HIDDEN)
    names = [x, *(net.weight(*shape, scale=scale) for shape in shapes)]
    names += [net.weight(directions, 2 * gates * HIDDEN, scale=scale) if bias else "", lengths]
    states = 2 if kind == "LSTM" else 1
    shape = (1, directions, HIDDEN) if attributes.get("layout") else (directions, 1, HIDDEN)
    names += [net.weight(*shape) if start else "" for _ in range(states)]
    names += [net.weight(directions, 3 * HIDDEN)] if peepholes else []
    while not names[-1]:
        names.pop()
    return net.add(kind, *names, outputs=3 if kind == "LSTM" else 2, hidden_size=HIDDEN, direction=direction, **attributes)


def steps(net: Net, y: str, *, layout: int = 0) -> str:
    """Join the directions of every step, as exporters write it."""
    joined = y if layout else net.add("Transpose", y, perm=[0, 2, 1, 3])
    return net.add("Reshape", joined, net.constant([0, 0, -1]))


def recurrent(kind: str, *, with_lengths: bool = False, layout: int = 0, **options: Any) -> ModelProto:
    """Return a graph of one node that answers every step."""
    net = Net(("batch", "steps", FEATURES) if layout else ("steps", "batch", FEATURES))
    lengths = net.input("lengths", TensorProto.INT32, "batch") if with_lengths else ""
    if layout:
        options["layout"] = 1
    return net.model(steps(net, node(net, kind, lengths=lengths, **options), layout=layout))


def final(kind: str, direction: str = "bidirectional", **options: Any) -> ModelProto:
    """Return a graph that answers the final hidden state of both directions."""
    net = Net(("steps", "batch", FEATURES))
    final = f"{node(net, kind, direction=direction, **options)}.1"
    return net.model(net.add("Reshape", net.add("Transpose", final, perm=[1, 0, 2]), net.constant([0, -1])))


def stacked(kind: str) -> ModelProto:
    """Return a graph with two layers, which answers the final state of the second as torch writes it."""
    net = Net(("steps", "batch", FEATURES))
    first = node(net, kind, direction="bidirectional")
    second = node(net, kind, steps(net, first), 2 * HIDDEN, direction="bidirectional")
    states = net.add("Concat", f"{first}.1", f"{second}.1", axis=0)
    forward, backward = (net.add("Gather", states, net.constant(np.array(index)), axis=0) for index in (-2, -1))
    return net.model(net.add("Concat", forward, backward, axis=1))


def merged(operator: str, *, half: bool = False, of_final: bool = False) -> ModelProto:
    """Return a graph that combines both directions number by number."""
    net = Net(("steps", "batch", FEATURES))
    y = node(net, "GRU", direction="bidirectional")
    if of_final:
        forward, backward = (net.add("Gather", f"{y}.1", net.constant(np.array(index)), axis=0) for index in (0, 1))
    else:
        forward, backward = (
            net.add("Squeeze", net.add("Slice", y, *(net.constant([i]) for i in (at, at + 1, 1))), net.constant([1]))
            for at in (0, 1)
        )
    combined = net.add(operator, forward, backward)
    return net.model(net.add("Mul", combined, net.constant(np.array(0.5, np.float32))) if half else combined)


def reversed_pair(*, wrong: bool = False) -> ModelProto:
    """Return a graph with two layers of one direction each, one over the reversed steps, as hand-written models have them."""
    net = Net(("steps", "batch", FEATURES))
    back = [net.constant([number]) for number in (-1, -(1 << 40), 0, -1)]
    forward = net.add("Squeeze", node(net, "LSTM"), net.constant([1]))
    backward = net.add("Squeeze", node(net, "LSTM", net.add("Slice", "x", *back)), net.constant([1]))
    restored = backward if wrong else net.add("Slice", backward, *back)
    return net.model(net.add("Concat", forward, restored, axis=2))


def _with_activations(kind: str, names: list[str]) -> ModelProto:
    """Return a graph with activations that have parameters unlike the defaults. Its weights are small: gates without limits grow."""
    alphas = [0.3 + 0.1 * index for index, name in enumerate(names) if name in WITH_ALPHA]
    betas = [0.6 - 0.1 * index for index, name in enumerate(names) if name in WITH_BETA]
    lists: dict[str, Any] = {"activation_alpha": alphas, "activation_beta": betas}
    return recurrent(kind, scale=0.2, activations=names, **{name: values for name, values in lists.items() if values})


def _direction_cases() -> list[Case]:
    return [
        Case(kind, f'direction "{direction}"', partial(recurrent, kind, direction=direction), axes=TIME_MAJOR)
        for kind in GATES
        for direction in ("forward", "reverse", "bidirectional")
    ]


def _case(kind: str, option: str, refused: str = "", **options: Any) -> Case:
    layout = options.get("layout", 0)
    return Case(
        kind, option, partial(recurrent, kind, **options), refused, axes=None if layout else TIME_MAJOR, reference=bool(layout)
    )


def _activation_cases() -> list[Case]:
    cases = []
    for name in ACTIVATIONS:
        of_rnn, of_gru, of_lstm = [name], [name, "Tanh"], ["Sigmoid", name, "Tanh"]
        for kind, names in (("RNN", of_rnn), ("GRU", of_gru), ("LSTM", of_lstm), ("LSTM", ["HardSigmoid", "Tanh", name])):
            option, graph = f"activations {', '.join(names)}", partial(_with_activations, kind, names)
            cases.append(Case(kind, option, graph, axes=TIME_MAJOR, lengths=(4, 1, 6)))
    return cases


CASES = [
    *_direction_cases(),
    *_activation_cases(),
    *(_case(kind, "without bias", bias=False, direction="bidirectional") for kind in GATES),
    *(_case(kind, "clip", clip=0.4, direction="bidirectional") for kind in GATES),
    *(_case(kind, "constant initial states", start=True, direction="bidirectional") for kind in GATES),
    *(_case(kind, "sequence_lens", with_lengths=True, direction="bidirectional") for kind in GATES),
    *(_case(kind, "layout 1", layout=1) for kind in GATES),
    _case("GRU", "linear_before_reset", linear_before_reset=1, direction="bidirectional"),
    _case("GRU", "linear_before_reset, without bias", linear_before_reset=1, bias=False),
    _case("GRU", "linear_before_reset and clip", linear_before_reset=1, clip=0.3),
    _case("LSTM", "peepholes", peepholes=True, direction="bidirectional"),
    _case("LSTM", "peepholes, clip and initial states", peepholes=True, clip=0.3, start=True),
    _case("LSTM", "input_forget", input_forget=1, direction="bidirectional"),
    _case("LSTM", "input_forget and peepholes", input_forget=1, peepholes=True, start=True),
    *(Case(kind, "final hidden state (Y_h)", partial(final, kind), axes=TIME_MAJOR) for kind in GATES),
    *(
        Case("LSTM", f'final hidden state, direction "{way}"', partial(final, "LSTM", way), axes=TIME_MAJOR)
        for way in ("forward", "reverse")
    ),
    *(Case(kind, "two layers, both bidirectional", partial(stacked, kind), axes=TIME_MAJOR) for kind in GATES),
    Case("Add, Mul", "sum of both directions", partial(merged, "Add"), axes=TIME_MAJOR),
    Case("Add, Mul", "mean of both directions", partial(merged, "Add", half=True), axes=TIME_MAJOR),
    Case("Add, Mul", "product of both directions", partial(merged, "Mul"), axes=TIME_MAJOR),
    Case("Add, Mul", "sum of the final states of both directions", partial(merged, "Add", of_final=True), axes=TIME_MAJOR),
    Case("Slice", "a forward layer, and one over reversed steps", reversed_pair, axes=TIME_MAJOR),
    _case(
        "LSTM",
        "other activations backward",
        "different activations",
        direction="bidirectional",
        activations=["Sigmoid", "Tanh"] * 3,
    ),
    _case(
        "LSTM", "input_forget with another activation", "couples", input_forget=1, activations=["HardSigmoid", "Tanh", "Tanh"]
    ),
    _case("RNN", "an activation that ONNX does not have", "Swish", activations=["Swish"]),
    _case("RNN", "a negative clip", "clip is -1", clip=-1.0),
    _case("RNN", "an unknown direction", "sideways", direction="sideways"),
    Case("Add, Mul", "maximum of both directions", partial(merged, "Max"), "no layer of model.toml does in this way"),
    Case("Slice", "steps in different orders", partial(reversed_pair, wrong=True), "joins tensors"),
]
