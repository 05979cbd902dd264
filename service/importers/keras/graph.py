"""Calls the layers of a model in order, on signals instead of arrays, and returns the signal of its first output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from service.importers.chain.nodes import Input, Mapped, Node
from service.importers.chain.reading import STEPS
from service.importers.chain.settling import settled
from service.importers.chain.signal import MOST_COLUMNS, Role, Signal, axis
from service.importers.draft import ImportRefused, named_in_refusals
from service.importers.keras import activations, layers, ops, recurrent, shapes
from service.importers.keras.architecture import LayerCall, LayerConfig, Network
from service.importers.keras.call import KerasCall, KerasMask, KerasReading, KerasTensor, Value
from service.importers.keras.weights import Weights

MOST_CALLS = 1000
LONGEST_FUNCTION = 2
"""Activations in a row that may together be one activation. Others are named one by one, which takes less time."""
Layer = Callable[[KerasCall], Value | Sequence[Value]]
OPERATIONS: dict[str, Layer] = {**ops.OPERATIONS, "NotEqual": shapes.mask}
LAYERS: dict[str, Layer] = {
    **OPERATIONS,  # an .h5 does not tell them from layers
    **layers.LAYERS,
    **shapes.LAYERS,
    **dict.fromkeys(activations.LAYERS, activations.layer),
    **dict.fromkeys((*recurrent.LAYERS, "RNN"), recurrent.recurrent),
    "Activation": activations.activation,
    "Bidirectional": recurrent.bidirectional,
    "Dot": ops.dot,
    "PReLU": activations.prelu,
    "Softmax": activations.softmax,
}
ADVICE = {
    "TextVectorization": "import the layers after it, and give its vocabulary with --tokenizer",
    "StringLookup": "import the layers after it, and give its vocabulary with --tokenizer",
}
"""Remedies for layers that have no place in a model."""


def run(network: Network, inputs: Sequence[Value], weights: Weights, reading: KerasReading) -> Value:
    """Return the first output of a network; raises ImportRefused if a layer cannot be imported."""
    given = {(one.layer, one.call): value for one, value in zip(network.inputs, inputs, strict=False)}
    values: dict[tuple[str, int], Sequence[Value]] = {}
    for name, number in network.calls():
        layer, node = network.layers[name], network.nodes[name, number]
        if (name, number) in given:
            values[name, number] = [given[name, number]]
            continue
        values[name, number] = _called(layer, node, values, weights, reading)
    output = network.outputs[0]
    return _output(values[output.layer, output.call], output.output, output.layer)


def start(network: Network, reading: KerasReading) -> KerasTensor:
    """Return the input of a model: token ids, or features."""
    if len(network.inputs) != 1:
        names = ", ".join(one.layer for one in network.inputs)
        raise ImportRefused(f"the model has {len(network.inputs)} inputs, {names}: a model takes one sequence")
    name = network.inputs[0].layer
    config = network.layers[name].config if name in network.layers else {}
    shape = next((config[key] for key in ("batch_shape", "batch_input_shape") if config.get(key) is not None), None)
    if not isinstance(shape, list) or len(shape) < 2 or not all(_is_size(size) for size in shape):
        raise ImportRefused(f"the input of the model has the shape {shape!r:.60}: build the model before it is saved")
    steps, columns = shape[1], shape[2:]
    if None in columns or (reading.takes_ids and columns):
        raise ImportRefused(
            f"the input of the model has the shape {shape}: token ids have the axes of the batch and of the steps"
        )
    reading.fixed, reading.steps = steps is not None, steps or STEPS
    width = int(np.prod(columns, dtype=object))
    if width > MOST_COLUMNS:
        raise ImportRefused(f"the input has {width} columns, and the limit is {MOST_COLUMNS}")
    axes = (axis(Role.BATCH, reading.batch), axis(Role.STEPS, reading.steps), *(axis(Role.COLUMNS, size) for size in columns))
    node = reading.ids if reading.takes_ids else Input(width)
    return KerasTensor(Signal(axes, (node,), np.arange(width).reshape(columns)))


def _called(
    layer: LayerConfig,
    node: LayerCall,
    values: Mapping[tuple[str, int], Sequence[Value]],
    weights: Weights,
    reading: KerasReading,
) -> Sequence[Value]:
    """Return the outputs of one call of a layer."""
    reading.progress += 1
    if reading.progress > MOST_CALLS:
        raise ImportRefused(f"the model has more than {MOST_CALLS} calls of layers")
    with named_in_refusals(f"{layer.kind} {layer.name}"):
        inputs = [
            one if isinstance(one, float) else _output(values[one.layer, one.call], one.output, one.layer)
            for one in node.inputs
        ]
        if node.masks:
            inputs = [KerasTensor(one.signal, is_masked=True) if isinstance(one, KerasTensor) else one for one in inputs]
        return [_settled(one) for one in _results(layer, node, inputs, weights, reading)]


def _settled(result: Value) -> Value:
    """Return a result with a short function above its layer."""
    if not isinstance(result, KerasTensor):
        return result
    return KerasTensor(
        result.signal.map_parts(lambda part: settled(part) if _functions(part) > LONGEST_FUNCTION else part), result.is_masked
    )


def _functions(node: Node) -> int:
    """Return how many functions there are in a row above a layer."""
    count = 0
    while isinstance(node, Mapped):
        node, count = node.below, count + 1
    return count


def _results(
    layer: LayerConfig, node: LayerCall, inputs: Sequence[Value | float], weights: Weights, reading: KerasReading
) -> Sequence[Value]:
    if layer.network is not None:
        tensors = [value for value in inputs if not isinstance(value, float)]
        return [run(layer.network, tensors, weights.within(layer), reading)]
    if layer.kind == "InputLayer":
        raise ImportRefused("it is not an input of the model")
    if any(isinstance(value, KerasMask) for value in inputs):
        return [KerasMask()]  # operations on masks
    call = KerasCall(layer, node, inputs, weights.paths(layer), reading)
    if layer.kind == "TimeDistributed":
        call.layer = recurrent.time_distributed(call)
    known = OPERATIONS if layer.is_operation else LAYERS
    if call.layer.kind not in known:
        advice = ADVICE.get(layer.kind, "`seqserve import --layers keras` lists the classes that can")
        raise ImportRefused(f"layers of this class cannot be imported: {advice}")
    _note_precision(call)
    _check_training(call)
    result = known[call.layer.kind](call)
    return result if isinstance(result, Sequence) else [result]


def _note_precision(call: KerasCall) -> None:
    policy = call.config.get("dtype")
    config = policy.get("config") if isinstance(policy, dict) else None
    name = config.get("name") if isinstance(config, dict) else policy
    if isinstance(name, str) and name != "float32":
        call.reading.note(f"the source computes in {name[:20]}, and the model in float32")


def _check_training(call: KerasCall) -> None:
    """Keras computes a layer that is called with training=True as in training, also at inference."""
    if call.node.options.get("training") is not True:
        return
    if call.layer.kind == "BatchNormalization":
        raise ImportRefused(
            "it is called with training=True: it normalises by the statistics of the batch, and a model by fixed ones"
        )
    call.reading.note(
        f"{call.label} is called with training=True: Keras drops numbers at random also at inference, and the model does not"
    )


def _output(outputs: Sequence[Value], number: int, name: str) -> Value:
    if not 0 <= number < len(outputs):
        raise ImportRefused(f"the layer {name} has {len(outputs)} outputs, and number {number} is used: save the model again")
    return outputs[number]


def _is_size(size: object) -> bool:
    return size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0)
