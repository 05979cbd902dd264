"""Writes a graph of ONNX that computes what the model answers.

The graph takes `input`, (batch, steps, features) or (batch, steps) token ids as int64, and, if its layers need them, `lengths`, (batch,)
int32: the steps of each sequence, of which the rest is padding. Numbers by step at padding mean nothing. A graph with convolutions or
pools over the steps, for which ONNX has no lengths, takes one sequence: (1, steps, ...).
"""

from __future__ import annotations

from service.exporters.model import Export, Model
from service.exporters.onnx import heads
from service.exporters.onnx.graph import INPUT, Graph
from service.exporters.onnx.heads import Encoded
from service.exporters.onnx.layers import LAYERS
from service.exporters.onnx.recurrent import OPERATORS, recurrent
from service.exporters.recipe import recipe
from service.modeling.spec import ModelSpec
from service.modeling.spec.layers import GatedLayer

STEPWISE = ("embedding", "dense", "activation", "layer_norm", "batch_norm", *OPERATORS)
"""Layers for which padding after the steps of a sequence changes nothing, with the lengths of the sequences."""
ENDS = {"last", "last_step", "first"}
"""Pools that take one step."""
ONE_SEQUENCE = "the graph takes one sequence, (1, steps, ...): its convolutions or pools would read the padding of a batch"


def export(model: Model) -> Export:
    """Return the graph of a model; raises ExportRefused."""
    has_batch = _takes_batches(model.spec)
    graph = Graph(model.spec.input.features, has_batch=has_batch)
    x = INPUT
    for layer, part in model.layers():
        graph.start(part.place)
        final = None
        if isinstance(layer, GatedLayer):
            x, final = recurrent(graph, layer, part, x)
        else:
            part.refuse(part.kind not in LAYERS, "ONNX has no operator like it", "Export the model to PyTorch")
            x = LAYERS[part.kind](graph, layer, part, x)
    answer = heads.answer(graph, model.spec.head, model.head(), Encoded(x, final, model.spec.has_steps))
    content = graph.model(model.spec.name, answer, heads.OUTPUTS[model.spec.head.kind], _output_shape(model.spec))
    return Export(content.SerializeToString(), recipe(model.spec), [] if has_batch else [ONE_SEQUENCE])


def _takes_batches(spec: ModelSpec) -> bool:
    return all(layer.kind in STEPWISE for layer in spec.layers) and ENDS.issuperset(spec.pools)


def _output_shape(spec: ModelSpec) -> tuple[int | str, ...]:
    """Return the shape of the answer for a sequence."""
    tensors = spec.tensors()
    width = tensors["head.bias"][0] if "head.bias" in tensors else spec.embedding_width
    return ("output_steps", width) if spec.head.kind in ("tag", "span", "sequence") else (width,)
