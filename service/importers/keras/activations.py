"""Translates the activations of Keras, which are names or layers with parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from service.importers.chain import operations
from service.importers.chain.functions import IDENTITY, Function, as_written, identify, named
from service.importers.chain.signal import Signal
from service.importers.draft import ImportRefused
from service.importers.keras.call import KerasCall, KerasTensor

SOFTMAX = {"softmax": False, "log_softmax": True}
"""Functions of a whole vector: whether they return logarithms."""
GLU = "glu"
NAMED: dict[str, Function] = {
    "linear": IDENTITY,
    **{name: named(name) for name in ("elu", "exponential", "gelu", "hard_tanh", "relu", "relu6", "selu", "sigmoid", "silu")},
    **{name: named(name) for name in ("softplus", "softsign", "tanh")},
    "celu": named("elu"),
    "leaky_relu": named("leaky_relu", alpha=0.2),
    "swish": named("silu"),
}
HARD_SIGMOID = "hard_sigmoid"
SLOPES = {True: named(HARD_SIGMOID, alpha=0.2, beta=0.5), False: named(HARD_SIGMOID, alpha=1 / 6, beta=0.5)}
"""The hard sigmoid of Keras 2, and of Keras 3."""


def function(value: Any, call: KerasCall) -> Function:
    """Return an activation in a configuration that is a function of single numbers; raises ImportRefused for any other."""
    if value is None:
        return IDENTITY
    kind = value if isinstance(value, str) else _name(value)
    if kind == HARD_SIGMOID:
        return SLOPES[call.reading.is_keras_2]
    if kind in NAMED:
        return NAMED[kind]
    if kind in LAYERS and isinstance(value, Mapping):
        return LAYERS[kind](_parameters(value, call))
    raise ImportRefused(f"its activation is {kind!r}: use one of {', '.join([*NAMED, HARD_SIGMOID])}")


def gate(key: str, call: KerasCall) -> str | dict[str, Any]:
    """Return an activation of a recurrent layer as model.toml writes it."""
    found = identify(function(call.value(key), call))
    if found is None:
        raise ImportRefused(f"its option {key} is a function that no activation of model.toml computes")
    return as_written(found)


def activated(x: Signal, value: Any, call: KerasCall) -> Signal:
    """Apply an activation in a configuration."""
    kind = value if value is None or isinstance(value, str) else _name(value)
    if kind in SOFTMAX:
        return operations.softmax(x, call.label, at=-1, log=SOFTMAX[kind])
    if kind == "Softmax":
        _parameters(value, call).refuse_options(axis=-1)
        return operations.softmax(x, call.label, at=-1)
    if kind == GLU:
        return operations.glu(x, x.rank - 1, call.label)
    return operations.apply(x, function(value, call), call.label, call.origins)


def activation(call: KerasCall) -> KerasTensor:
    """The layer Activation."""
    return call.result(activated(call.signal, call.value("activation"), call))


def layer(call: KerasCall) -> KerasTensor:
    """A layer that is an activation with parameters."""
    return call.result(operations.apply(call.signal, LAYERS[call.layer.kind](call), call.label))


def softmax(call: KerasCall) -> KerasTensor:
    """Softmax and LogSoftmax: over labels, along the last axis, or over the steps of an attention pool."""
    at, log = call.axis(call.signal.rank, -1), call.layer.kind == "LogSoftmax"
    return call.result(operations.softmax(call.signal, call.label, at=at, log=log))


def prelu(call: KerasCall) -> KerasTensor:
    [slopes] = call.weights("alpha")
    return call.result(operations.prelu(call.signal, slopes, call.label, call.origins))


def _relu(call: KerasCall) -> Function:
    top, slope, threshold = call.value("max_value", None), call.number("negative_slope", 0.0), call.number("threshold", 0.0)
    highest = np.inf if top is None else call.number("max_value")
    if threshold and not slope and top is None:
        return named("thresholded_relu", alpha=threshold)

    def relu(x: Any) -> Any:
        return np.where(x >= threshold, np.minimum(x, highest), slope * (x - threshold))

    return Function(relu)


LAYERS: dict[str, Callable[[KerasCall], Function]] = {
    "ELU": lambda call: named("elu", alpha=call.number("alpha", 1.0)),
    # `alpha` is the name of the slope in Keras 2.
    "LeakyReLU": lambda call: named(
        "leaky_relu", alpha=call.number("alpha" if "alpha" in call.config else "negative_slope", 0.3)
    ),
    "ReLU": _relu,
    "ThresholdedReLU": lambda call: named("thresholded_relu", alpha=call.number("theta", 1.0)),
}


def _name(value: Any) -> str:
    """Return the name of an activation that is written as a table: a layer, or a function."""
    kind, config = (value.get("class_name"), value.get("config")) if isinstance(value, Mapping) else (None, None)
    if kind == "function" and isinstance(config, str):
        raise ImportRefused(
            f"its activation is the function {config}, which is code and is not run: use an activation of Keras"
        )
    return str(kind)


def _parameters(value: Mapping[str, Any], call: KerasCall) -> KerasCall:
    """Return a call of a layer that is the activation of another."""
    config = value.get("config")
    inner = call.layer.__class__(str(value.get("class_name")), call.layer.name, config if isinstance(config, dict) else {}, "")
    return KerasCall(inner, call.node, call.inputs, (), call.reading, call.origins)
