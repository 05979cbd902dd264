"""Imports ONNX files: the graphs that torch exports, and graphs made by hand. onnx reads the file, and nothing is run.

A graph is interpreted rather than matched against patterns: `graph` follows it from the input to the first output, `operators` translate
each node into an operation of `service.importers.chain`, and `readings` are the ways to understand the axes of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from service.importers.chain.finishing import finished
from service.importers.chain.reading import Reading
from service.importers.draft import Draft, ImportRefused
from service.importers.onnx.file import Tensors, read_model
from service.importers.onnx.graph import MALFORMED, Graph
from service.importers.onnx.readings import GraphInput, InputPlan, plans


def read(path: Path) -> Draft:
    """Return the model in an .onnx file; raises ImportRefused if model.toml cannot express it."""
    try:
        return _read(path)
    except MALFORMED as error:
        raise ImportRefused(f"{path} is damaged ({type(error).__name__}: {error}): export the model again") from error


def _read(path: Path) -> Draft:
    graph = Graph(read_model(path), Tensors(path.parent))
    inputs = [GraphInput.of(info) for info in graph.inputs]
    failures: list[tuple[int, ImportRefused]] = []
    for plan in plans(inputs):
        for reading, draft in _attempts(graph, plan, failures):
            _complete(draft, graph, plan, reading)
            return draft
    if not failures:
        names = ", ".join(f"{one.name} {one.sizes}" for one in inputs) or "none"
        raise ImportRefused(
            f"{path}: no input is a sequence of token ids or features. The inputs without values are {names}; weights are initializers"
        )
    furthest = max(failures, key=lambda failure: failure[0])[1]
    raise ImportRefused(f"{path}: {furthest}") from furthest


def _attempts(graph: Graph, plan: InputPlan, failures: list[tuple[int, ImportRefused]]) -> Iterator[tuple[Reading, Draft]]:
    """Yield the model of a plan. A graph of any length may work for one length only, at which a pooling window covers every step."""
    lengths: list[int | None] = [None]
    for steps in lengths:
        reading, values = plan.start(graph.opset, steps)
        try:
            draft = finished(graph.interpret(values, reading), "ONNX graph")
            if not reading.fixed:
                other, values = plan.start(graph.opset, reading.steps + 2)
                again = finished(graph.interpret(values, other), "ONNX graph").arrays()
                if any(not np.array_equal(array, again.get(name, ())) for name, array in draft.arrays().items()):
                    raise ImportRefused(
                        "its numbers depend on the number of steps: take the mean of the steps by its own operator"
                    )
            yield reading, draft
        except ImportRefused as refused:
            failures.append((reading.progress, refused))
            lengths += [length for length in dict.fromkeys(reading.whole_pools) if length not in lengths][:2]


def _complete(draft: Draft, graph: Graph, plan: InputPlan, reading: Reading) -> None:
    """Add the results of interpreting the graph: notes, unused tensors and the source itself."""
    reading.complete(draft, graph.weights, "graph", graph.outputs)
    if reading.lengths and draft.head.table.get("pool") not in (None, "last") and not reading.masks:
        draft.notes.append("in a batch, the graph also pools the padding of shorter sequences, which the model does not have")
    draft.original = graph.original(plan, reading.steps if reading.fixed else None)
