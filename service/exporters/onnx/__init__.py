"""Writes a graph of ONNX that computes the answers of the model.

The graph takes `input`, (batch, steps, features) or (batch, steps) token ids as int64, and, if its layers need them, `lengths`, (batch,)
int32: the steps of each sequence, after which padding follows. Numbers by step at padding mean nothing. A graph with a layer that changes
the number of steps takes one sequence: (1, steps, ...).
"""

from __future__ import annotations

from typing import Any

from service.exporters.model import Export, Model
from service.exporters.onnx import heads
from service.exporters.onnx.graph import INPUT, ExportedGraph
from service.exporters.onnx.heads import Encoded
from service.exporters.onnx.layers import LAYERS, takes_batches
from service.exporters.onnx.recurrent import recurrent
from service.modeling.spec import ModelSpec
from service.modeling.spec.heads import ClassifyHead, RegressHead
from service.modeling.spec.layers import GatedLayer

ONE_SEQUENCE = "the graph takes one sequence, (1, steps, ...): a layer has another number of steps than the input"


def export(model: Model) -> Export:
    """Return the graph of a model; raises ExportRefused."""
    has_batch = all(takes_batches(layer) for layer in model.spec.layers)
    graph = ExportedGraph(model.spec.input.features, has_batch=has_batch)
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
    content = graph.model(model.spec.name, answer, model.spec.head.main_output or "logits", _output_shape(model.spec))
    return Export(content.SerializeToString(), _recipe(model), "" if has_batch else ONE_SEQUENCE)


def _recipe(model: Model) -> dict[str, Any]:
    """Return the labels, and the use of the output. An import reads one number from a logistic function as the probability of the second
    of two labels."""
    tables = model.spec.model_dump(exclude_defaults=True)
    head, described = tables["head"], model.spec.head
    head.pop("dense", None)
    if isinstance(described, ClassifyHead) and len(described.labels) == 1:
        head = {"labels": [f"not {described.labels[0]}", described.labels[0]]}
    elif isinstance(described, RegressHead) and described.outputs == 1 and described.activation.kind == "sigmoid":
        head = {}
    return {**model.recipe(), "input": {"max_steps": model.spec.input.max_steps}, **({"head": head} if head else {})}


def _output_shape(spec: ModelSpec) -> tuple[int | str, ...]:
    """Return the shape of the answer for a sequence."""
    tensors = spec.tensors()
    width = tensors["head.bias"][0] if "head.bias" in tensors else spec.embedding_width
    return (width,) if spec.pools else ("output_steps", width)
