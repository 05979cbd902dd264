"""Reads the architecture of a model from the JSON that Keras 2 and Keras 3 write: layers, and the calls that connect them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from service.importers.draft import UNFIT, ImportRefused, refusing
from service.modeling.spec.activations import class_name

MOST_LAYERS = 1000
DEEPEST_NETWORK = 8
"""Models within models."""
FUNCTIONAL = ("Functional", "Model")
OF_KERAS = ("keras", "tf_keras", "tensorflow.python.keras", "tensorflow.keras")
OPS = ".ops"
LAMBDAS = ("TFOpLambda", "SlicingOpLambda")
"""The layers as which Keras 2 writes functions of TensorFlow."""
_MATH = ("add", "maximum", "minimum", "multiply", "not_equal", "sigmoid", "subtract", "tanh")
TENSORFLOW = {
    **{f"math.{name}": class_name(name) for name in _MATH},
    **{f"math.reduce_{name}": class_name(name) for name in ("max", "mean", "sum")},
    "__operators__.add": "Add",
    "__operators__.getitem": "GetItem",
    "concat": "Concatenate",
    "expand_dims": "ExpandDims",
    "nn.relu": "Relu",
    "nn.softmax": "Softmax",
    "reverse": "Flip",
    "squeeze": "Squeeze",
}
"""Functions of TensorFlow, and the functions of keras.ops that compute the same."""
SECOND = ("y",)
"""The argument of a function of TensorFlow that is its second input."""
UNLIKE_KERAS = (*UNFIT, AttributeError)
TENSOR = "__keras_tensor__"
CONSTANT = "_CONSTANT_VALUE"


class Reference(NamedTuple):
    """An output of a call: the name of the layer, the number of the call, and the number of the output."""

    layer: str
    call: int
    output: int


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer in the architecture.

    inputs: in order, with numbers for constants; masks: among the other arguments; others: the names of arguments with tensors that are no
    masks; options: other arguments; arguments: positional arguments, as they are written.
    """

    inputs: tuple[Reference | float, ...]
    masks: tuple[Reference, ...] = ()
    others: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Sequence[Any] = ()

    @property
    def references(self) -> list[Reference]:
        return [*(one for one in self.inputs if isinstance(one, Reference)), *self.masks]


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """A layer as its configuration describes it. module: where its class is; network: of a model within the model."""

    kind: str
    name: str
    config: Mapping[str, Any]
    module: str
    network: Network | None = None

    @property
    def is_operation(self) -> bool:
        """Whether it is a function of keras.ops, which has no weights and may have the name of a layer."""
        return self.module.endswith(OPS) or f"{OPS}." in self.module


@dataclass(frozen=True, slots=True)
class Network:
    """A model: its layers by name, and their calls."""

    name: str
    layers: Mapping[str, LayerConfig]
    nodes: Mapping[tuple[str, int], LayerCall]
    inputs: tuple[Reference, ...]
    outputs: tuple[Reference, ...]

    def calls(self) -> list[tuple[str, int]]:
        """Return the calls that the first output depends on, in the order of computation."""
        ordered: list[tuple[str, int]] = []
        entered: set[tuple[str, int]] = set()
        done: set[tuple[str, int]] = set()
        waiting = [(self.outputs[0].layer, self.outputs[0].call)]
        while waiting:
            call = waiting[-1]
            entered.add(call)
            if call not in self.nodes:
                raise ImportRefused(f"the architecture has no call {call[1]} of a layer {call[0]}: save the model again")
            needed = [(one.layer, one.call) for one in self.nodes[call].references if (one.layer, one.call) not in done]
            if any(one in entered for one in needed):
                raise ImportRefused(f"the architecture has a cycle through the layer {call[0]}: save the model again")
            waiting += needed
            if not needed:
                waiting.pop()
                if call not in done:
                    done.add(call)
                    ordered.append(call)
        return ordered


def is_of_keras(module: str) -> bool:
    """Whether a module belongs to Keras."""
    return any(f"{module}.".startswith(f"{name}.") for name in OF_KERAS)


def network(data: Any) -> Network:
    """Return the architecture in a decoded JSON; raises ImportRefused if it is none, or has code."""
    with refusing(UNLIKE_KERAS, "the architecture is not as Keras writes it", "save the model again"):
        return _network(data, depth=0)


def layer_config(data: Any) -> LayerConfig:
    """Return a layer within a wrapper such as Bidirectional; raises ImportRefused if it is none, or has code."""
    with refusing(UNLIKE_KERAS, "the architecture is not as Keras writes it", "save the model again"):
        return _layer(data, depth=0)


def _layer(data: Mapping[str, Any], depth: int) -> LayerConfig:
    kind, config = _text(data["class_name"]), data["config"]
    module = str(data.get("module") or "")
    name = _text(data.get("name") or (config["name"] if isinstance(config, dict) else kind))
    registered = str(data.get("registered_name") or "")
    is_network = kind == "Sequential" or kind in FUNCTIONAL
    if ">" in f"{kind}{registered}" or (module and not is_of_keras(module)):
        raise ImportRefused(f"{kind} {name} is custom code, which is not run: only layers of Keras can be imported")
    if kind == "Lambda":
        raise ImportRefused(f"Lambda {name} has Python code, which is not run: replace it with layers of Keras")
    if kind in LAMBDAS:
        function = _text(config["function"]).removeprefix("compat.v1.")
        return LayerConfig(TENSORFLOW.get(function, f"{kind} of {function}"), name, {}, f"keras{OPS}")
    inner = _network(data, depth + 1) if is_network else None
    if inner is None and not isinstance(config, dict):
        raise TypeError(f"the configuration of {name} is no table")
    return LayerConfig(kind, name, config if isinstance(config, dict) else {}, module, inner)


def _network(data: Mapping[str, Any], depth: int) -> Network:
    if depth > DEEPEST_NETWORK:
        raise ImportRefused(f"the architecture has models within more than {DEEPEST_NETWORK} others")
    kind = _text(data["class_name"])
    if kind == "Sequential":
        return _sequential(data, depth)
    if kind in FUNCTIONAL and "layers" in data["config"]:
        return _functional(data["config"], depth)
    raise ImportRefused(
        f"the model is of the class {kind}, whose computation is Python code: only Sequential and functional models can be imported"
    )


def _sequential(data: Mapping[str, Any], depth: int) -> Network:
    config = data["config"]
    entries = config if isinstance(config, list) else config["layers"]
    _check_count(entries)
    layers = _by_name(_layer(entry, depth) for entry in entries)
    first = next(iter(layers.values()))
    if first.kind != "InputLayer":
        layers = {"": LayerConfig("InputLayer", "", {"batch_shape": _input_shape(data, first)}, ""), **layers}
    nodes: dict[tuple[str, int], LayerCall] = {}
    above: tuple[Reference, ...] = ()
    for name in layers:
        nodes[name, 0] = LayerCall(above)
        above = (Reference(name, 0, 0),)
    names = list(layers)
    name = "sequential" if isinstance(config, list) else str(config.get("name", "sequential"))
    return Network(name, layers, nodes, (Reference(names[0], 0, 0),), above)


def _input_shape(data: Mapping[str, Any], first: LayerConfig) -> Any:
    """Return the shape of the input of a Sequential model without an InputLayer, or None if it was not built."""
    config = data["config"] if isinstance(data["config"], dict) else {}
    given = (first.config.get("batch_input_shape"), config.get("build_input_shape"))
    return next((shape for shape in given if shape is not None), (data.get("build_config") or {}).get("input_shape"))


def _functional(config: Mapping[str, Any], depth: int) -> Network:
    entries = config["layers"]
    _check_count(entries)
    layers = _by_name(_layer(entry, depth) for entry in entries)
    found = {_text(entry.get("name") or entry["config"]["name"]): [_node(node) for node in _listed(entry)] for entry in entries}
    outputs = tuple(_references(config["output_layers"]))
    used = {(one.layer, one.call) for nodes in found.values() for node in nodes for one in node.references}
    used |= {(one.layer, one.call) for one in outputs}
    nodes: dict[tuple[str, int], LayerCall] = {}
    for name, calls in found.items():
        # Keras 2 counts the calls of a model within a model from 1.
        first = 1 if layers[name].network is not None and (name, len(calls)) in used else 0
        nodes |= {(name, first + number): node for number, node in enumerate(calls or [LayerCall(())])}
    inputs = tuple(_references(config["input_layers"]))
    if not inputs or not outputs:
        raise ImportRefused("the architecture has no input or no output: save the model again")
    return Network(str(config.get("name", "model")), layers, nodes, inputs, outputs)


def _listed(entry: Mapping[str, Any]) -> list[Any]:
    """Return the calls of a layer. Keras 2 writes the only call of an operation without the outer list."""
    nodes: list[Any] = entry["inbound_nodes"]
    return [[node] if isinstance(node, list) and node and isinstance(node[0], str) else node for node in nodes]


def _node(data: Any) -> LayerCall:
    """Return a call, as Keras 3 writes it, {"args", "kwargs"}, or Keras 2, [[layer, call, output, arguments], ...]."""
    if isinstance(data, dict):
        inputs, arguments = data["args"], data["kwargs"]
    else:
        arguments = {name: value for entry in data if len(entry) > 3 for name, value in entry[3].items()}
        inputs = [entry[:3] for entry in data] + [arguments.pop(name) for name in SECOND if name in arguments]
    masks: list[Reference] = []
    others: list[str] = []
    for name, value in arguments.items():
        found = [leaf for leaf in _leaves(value) if isinstance(leaf, Reference)]
        if name == "mask":
            masks += found
        elif found:
            others.append(name)
    options = {name: value for name, value in arguments.items() if name not in ("mask", *others)}
    return LayerCall(tuple(_leaves(inputs)), tuple(masks), tuple(others), options, inputs)


def _leaves(value: Any) -> Iterator[Reference | float]:
    """Yield the tensors and the numbers in the arguments of a call, however they are nested."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case {"class_name": name, "config": config} if name == TENSOR:
                yield _reference(config["keras_history"])
            case dict() as item:
                waiting += reversed(list(item.values()))
            case [str(name), int() | float(), int() | float() as output] as item:
                yield float(output) if name == CONSTANT else _reference(item)
            case list() as item:
                waiting += reversed(item)
            case int() | float() as number if not isinstance(number, bool):
                yield float(number)


def _references(value: Any) -> Iterator[Reference]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, Reference))


def _reference(item: Any) -> Reference:
    name, call, output = item
    return Reference(_text(name), int(call), int(output))


def _by_name(layers: Iterator[LayerConfig]) -> dict[str, LayerConfig]:
    named: dict[str, LayerConfig] = {}
    for layer in layers:
        if layer.name in named:
            raise ImportRefused(f"the architecture has two layers named {layer.name}: save the model again")
        named[layer.name] = layer
    return named


def _check_count(entries: Any) -> None:
    if not isinstance(entries, list) or not 0 < len(entries) <= MOST_LAYERS:
        raise ImportRefused(f"the architecture has no layers, or more than {MOST_LAYERS}: save the model again")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no name")
    return value
