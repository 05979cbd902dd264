"""LSTM, GRU and RNN of ONNX: every option, alone and with others."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from tests.importers.onnx.graphs import FEATURES, Case, Net, Operator

HIDDEN = 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
TIME_MAJOR = (1, 0, 2)
STEPS_FIRST = ("steps", "batch", FEATURES)
BOTH = "bidirectional"
WITH_ALPHA = ("Affine", "Elu", "HardSigmoid", "LeakyRelu", "ScaledTanh", "ThresholdedRelu")
WITH_BETA = ("Affine", "HardSigmoid", "ScaledTanh")
ACTIVATIONS = (*WITH_ALPHA, "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")


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
    directions, gates = 2 if direction == BOTH else 1, GATES[kind]
    shapes = (directions, gates * HIDDEN, inputs), (directions, gates * HIDDEN, HIDDEN)
    names = [x, *(net.weight(*shape, scale=scale) for shape in shapes)]
    names += [net.weight(directions, 2 * gates * HIDDEN, scale=scale) if bias else "", lengths]
    shape = (1, directions, HIDDEN) if attributes.get("layout") else (directions, 1, HIDDEN)
    names += [net.weight(*shape) if start else "" for _ in range(2 if kind == "LSTM" else 1)]
    names += [net.weight(directions, 3 * HIDDEN)] if peepholes else []
    while not names[-1]:
        names.pop()
    return net.add(kind, *names, outputs=3 if kind == "LSTM" else 2, hidden_size=HIDDEN, direction=direction, **attributes)


JOINED: tuple[Operator, Operator] = (("Transpose", {"perm": [0, 2, 1, 3]}), ("Reshape", [0, 0, -1]))
"""Join the directions of every step, as exporters write it."""


def recurrent(kind: str, *, with_lengths: bool = False, **options: Any) -> ModelProto:
    """Return a graph of one node that answers every step."""
    layout = options.get("layout", 0)
    net = Net(("batch", "steps", FEATURES) if layout else STEPS_FIRST)
    lengths = net.input("lengths", TensorProto.INT32, "batch") if with_lengths else ""
    return net.model(net.chain(node(net, kind, lengths=lengths, **options), *JOINED[layout:]))


def final(kind: str, direction: str = BOTH) -> ModelProto:
    """Return a graph that answers the final hidden state of both directions."""
    net = Net(STEPS_FIRST)
    state = f"{node(net, kind, direction=direction)}.1"
    return net.model(net.chain(state, ("Transpose", {"perm": [1, 0, 2]}), ("Reshape", [0, -1])))


def stacked(kind: str) -> ModelProto:
    """Return a graph with two layers, which answers the final state of the second as torch writes it."""
    net = Net(STEPS_FIRST)
    first = node(net, kind, direction=BOTH)
    second = node(net, kind, net.chain(first, *JOINED), 2 * HIDDEN, direction=BOTH)
    states = net.add("Concat", f"{first}.1", f"{second}.1", axis=0)
    ends = (net.chain(states, ("Gather", np.array(index), {"axis": 0})) for index in (-2, -1))
    return net.model(net.add("Concat", *ends, axis=1))


def merged(operator: str, *more: Operator, of_final: bool = False) -> ModelProto:
    """Return a graph that combines both directions number by number."""
    net = Net(STEPS_FIRST)
    y = node(net, "GRU", direction=BOTH)
    if of_final:
        both = [net.chain(f"{y}.1", ("Gather", np.array(index), {"axis": 0})) for index in (0, 1)]
    else:
        both = [net.chain(y, ("Slice", [at], [at + 1], [1]), ("Squeeze", [1])) for at in (0, 1)]
    return net.model(net.chain(net.add(operator, *both), *more))


def reversed_pair(*, restored: bool = True) -> ModelProto:
    """Return a graph with two layers of one direction each, one over the reversed steps, as hand-written models have them."""
    net = Net(STEPS_FIRST)
    back: Operator = ("Slice", [-1], [-(1 << 40)], [0], [-1])
    forward = net.chain(node(net, "LSTM"), ("Squeeze", [1]))
    backward = net.chain(node(net, "LSTM", net.chain("x", back)), ("Squeeze", [1]), *([back] if restored else []))
    return net.model(net.add("Concat", forward, backward, axis=2))


def _with_activations(kind: str, names: list[str]) -> ModelProto:
    """Return a graph with activations that have parameters unlike the defaults. Its weights are small: gates without limits grow."""
    alphas = [0.3 + 0.1 * index for index, name in enumerate(names) if name in WITH_ALPHA]
    betas = [0.6 - 0.1 * index for index, name in enumerate(names) if name in WITH_BETA]
    lists: dict[str, Any] = {"activation_alpha": alphas, "activation_beta": betas}
    return recurrent(kind, scale=0.2, activations=names, **{name: values for name, values in lists.items() if values})


def _case(kind: str, option: str, refused: str = "", *, more: bool = False, **options: Any) -> Case:
    axes, has_layout = (None, True) if options.get("layout") else (TIME_MAJOR, False)
    return Case(f"{kind}: {option}", partial(recurrent, kind, **options), refused, more, axes, reference=has_layout)


def _activations(kind: str, *names: str, more: bool = False) -> Case:
    build = partial(_with_activations, kind, list(names))
    return Case(f"{kind}: activations {', '.join(names)}", build, more=more, axes=TIME_MAJOR, lengths=(4, 1, 6))


def _other(name: str, build: Any, refused: str = "", *, more: bool = False) -> Case:
    return Case(name, build, refused, more, TIME_MAJOR)


CASES = [
    *(_case(kind, way, direction=way) for kind in GATES for way in ("forward", "reverse", BOTH)),
    *(_activations("RNN", name) for name in ACTIVATIONS),
    _activations("GRU", "HardSigmoid", "Relu"),
    _activations("LSTM", "HardSigmoid", "ScaledTanh", "Affine"),
    *(
        _activations(kind, *(name if each == "_" else each for each in names), more=True)
        for name in ACTIVATIONS
        for kind, names in (("GRU", ["_", "Tanh"]), ("LSTM", ["Sigmoid", "_", "Tanh"]), ("LSTM", ["HardSigmoid", "Tanh", "_"]))
    ),
    *(_case(kind, "without bias", bias=False, direction=BOTH) for kind in GATES),
    *(_case(kind, "clip", clip=0.4, direction=BOTH) for kind in GATES),
    *(_case(kind, "constant initial states", start=True, direction=BOTH) for kind in GATES),
    *(_case(kind, "sequence_lens", with_lengths=True, direction=BOTH, more=kind != "LSTM") for kind in GATES),
    *(_case(kind, "layout 1", layout=1, more=kind != "LSTM") for kind in GATES),
    _case("GRU", "linear_before_reset", linear_before_reset=1, direction=BOTH),
    _case("LSTM", "peepholes", peepholes=True, direction=BOTH),
    _case("LSTM", "input_forget", input_forget=1, direction=BOTH),
    _case("LSTM", "input_forget and peepholes", input_forget=1, peepholes=True, start=True),
    *(_other(f"{kind}: final hidden state", partial(final, kind), more=kind == "RNN") for kind in GATES),
    *(_other(f"{kind}: two layers", partial(stacked, kind), more=kind != "GRU") for kind in GATES),
    _other("sum of both directions", partial(merged, "Add")),
    _other("mean of both directions", partial(merged, "Add", ("Mul", 0.5))),
    _other("product of both directions", partial(merged, "Mul")),
    _other("sum of the final states of both directions", partial(merged, "Add", of_final=True)),
    _other("a forward layer, and one over reversed steps", reversed_pair),
    _case("LSTM", "other activations backward", "different activations", direction=BOTH, activations=["Sigmoid", "Tanh"] * 3),
    _case("LSTM", "input_forget, HardSigmoid", "couples", input_forget=1, activations=["HardSigmoid", "Tanh", "Tanh"]),
    _case("RNN", "an activation that ONNX does not have", "Swish", activations=["Swish"]),
    _case("RNN", "a negative clip", "clip is -1", clip=-1.0),
    _case("RNN", "an unknown direction", "sideways", direction="sideways"),
    _other("maximum of both directions", partial(merged, "Max"), "no layer of model.toml does in this way"),
    _other("steps in different orders", partial(reversed_pair, restored=False), "joins tensors"),
]
