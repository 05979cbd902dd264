"""Imports ONNX files: the graphs that torch exports, and graphs made by hand. onnx reads the file, and nothing is run.

A graph is interpreted rather than matched against patterns: `graph` follows it from the input to the first output, `operators` translate
each node into an operation of `service.importers.chain`, and `readings` are the ways to understand the axes of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from service.importers.chain.finishing import finished
from service.importers.draft import Draft, ImportRefused
from service.importers.onnx.file import Tensors, read_model
from service.importers.onnx.graph import MALFORMED, Graph
from service.importers.onnx.readings import GraphInput, Start, first_draft, plans


def read(path: Path) -> Draft:
    """Return the model in an .onnx file; raises ImportRefused if model.toml cannot express it."""
    try:
        return _read(path)
    except MALFORMED as error:
        raise ImportRefused(f"{path} is damaged ({type(error).__name__}: {error}): export the model again") from error


def _read(path: Path) -> Draft:
    graph = Graph(read_model(path), Tensors(path.parent))
    inputs = [GraphInput.of(info) for info in graph.inputs]
    found = first_draft(path, _starts(graph, inputs), partial(_translated, graph))
    if found is None:
        names = ", ".join(f"{one.name} {one.sizes}" for one in inputs) or "none"
        raise ImportRefused(
            f"{path}: no input is a sequence of token ids or features. The inputs without values are {names}; weights are initializers"
        )
    _complete(graph, *found)
    return found[0]


def _starts(graph: Graph, inputs: Sequence[GraphInput]) -> Iterator[Start]:
    """Yield the readings. A graph of any length may work for one length only, at which a pooling window covers every step."""
    for plan in plans(inputs):
        lengths: list[int | None] = [None]
        for steps in lengths:
            start = plan.start(graph.opset, steps)
            yield start
            lengths += [length for length in dict.fromkeys(start.reading.whole_pools) if length not in lengths][:2]


def _translated(graph: Graph, start: Start) -> Draft:
    draft = finished(graph.interpret(start.values, start.reading), "ONNX graph")
    if not start.reading.fixed:
        _, other, values = start.plan.start(graph.opset, start.reading.steps + 2)
        again = finished(graph.interpret(values, other), "ONNX graph").arrays()
        if any(not np.array_equal(array, again.get(name, ())) for name, array in draft.arrays().items()):
            raise ImportRefused("its numbers depend on the number of steps: take the mean of the steps by its own operator")
    return draft


def _complete(graph: Graph, draft: Draft, start: Start) -> None:
    """Add the results of interpreting the graph: notes, unused tensors and the source itself."""
    plan, reading, _ = start
    reading.complete(draft, graph.weights, "graph", graph.outputs)
    if reading.lengths and draft.head.table.get("pool") not in (None, "last") and not reading.masks:
        draft.notes.append("in a batch, the graph also pools the padding of shorter sequences, which the model does not have")
    draft.original = graph.original(plan, reading.steps if reading.fixed else None)
