"""Writes the computation of a signal as a model.toml: input, layers and head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from service.importers.chain.joining import in_order, joined
from service.importers.chain.nodes import RECURRENT, Input, Layer, Node, Pooled, Settled, check_matrix, selection
from service.importers.chain.signal import Columns, Role, Signal
from service.importers.draft import Array, Draft, ImportRefused, Part


def finished(output: Signal, source: str) -> Draft:
    """Return the model with a signal as its output. Its input has no max_steps, and its labels are numbers."""
    if output.rows_are_sorted:
        raise ImportRefused("the sequences of the output are in order of their lengths: restore their order in the graph")
    node, columns = joined(output)
    below, head, origins, notes = _steps_head(node, columns) if output.has_steps else _vector_head(node, columns)
    layers = _deepened(_layers_above_input(below))
    if output.has_steps and output.is_reversed:
        notes = [*notes, "the source answers the steps in reverse order, and the model in the order of the input"]
    parts = [(layer.label, Part(layer.table, layer.arrays), layer.origins) for layer in layers]
    draft = Draft(
        source,
        _input(below),
        [_in_float32(label, part) for label, part, _ in parts],
        _in_float32("the head", head),
        notes=notes,
    )
    draft.answers = head.table["kind"]
    draft.as_answer = partial(_as_answer, output, node, head.table["kind"])
    for index, (_, part, used) in enumerate(parts):
        draft.used |= dict.fromkeys(used, f"layers.{index} ({part.table['kind']})")
    draft.used |= dict.fromkeys(origins, f"head ({head.table['kind']})")
    return draft


def _as_answer(output: Signal, node: Settled, kind: str, answer: Array) -> Array:
    """Return an answer of the source as the model has it.

    Of several sequences, the first counts. One probability becomes two, for two labels; logarithms become probabilities; steps come in the
    order of the input.
    """
    for index in range(output.rank):
        if answer.ndim == output.rank and output.is_on(index, Role.BATCH):
            answer = answer.take([0], index)
    if isinstance(node, Layer) and node.kind == "softmax" and node.table["log"]:
        answer = np.exp(answer)
    if kind == "classify" and answer.size == 1:
        answer = np.concatenate([1 - answer.ravel(), answer.ravel()])
    return answer.reshape(-1, node.width)[::-1] if output.has_steps and output.is_reversed else answer


def _steps_head(node: Settled, columns: Columns) -> tuple[Node, Part, frozenset[str], list[str]]:
    """Return the node below the head of a model that answers for every step, the head, its origins, and notes."""
    if isinstance(node, Layer) and node.kind == "softmax":
        _check_order(node, columns)
        top = _ending_in_product(node.below)
        head = Part({"kind": "tag", "labels": _labels(top.width)}, top.arrays)
        return top.below, head, top.origins, _softmax_notes(node)
    if isinstance(node, Input):
        raise ImportRefused("the output is the input")
    notes = []
    if not in_order(columns, node.width):
        node = selection(node, columns, "the output")
    elif isinstance(node, Layer) and node.kind == "dense" and node.table["activation"] == "none":
        notes.append(f"{node.label} is the last layer, and its numbers are answered as they are, without softmax")
    return node, Part({"kind": "sequence"}), frozenset(), notes


def _vector_head(node: Settled, columns: Columns) -> tuple[Node, Part, frozenset[str], list[str]]:
    """Return the node below the pool of a model that answers once for a sequence, the head, its origins, and notes."""
    if isinstance(node, Layer) and node.kind == "softmax":
        _check_order(node, columns)
        pool, dense = _dense_above_pool(_ending_in_product(node.below))
        top = dense.pop()
        table: dict[str, Any] = {"kind": "classify", "labels": _labels(top.width)}
        return _with_pool(pool, dense, Part(table, top.arrays), top.origins, _softmax_notes(node))
    if isinstance(node, Layer) and node.kind == "normalize":
        _check_order(node, columns)
        pool, dense = _dense_above_pool(node.below)
        return _with_pool(pool, dense, Part({"kind": "embed", "normalize": True}), frozenset(), [])
    if isinstance(node, Layer):
        pool, dense = _dense_above_pool(node)
        top = dense.pop()
        part, notes = _scores(top, top.arrays["weight"][:, columns], top.arrays["bias"][columns])
        return _with_pool(pool, dense, part, top.origins, notes)
    if isinstance(node, Input):
        raise ImportRefused("the output is the input")
    chosen = [] if in_order(columns, node.width) else [selection(node, columns, "the output")]
    return _with_pool(node, chosen, Part({"kind": "embed"}), frozenset(), [])


def _scores(top: Layer, weight: Array, bias: Array) -> tuple[Part, list[str]]:
    """Return a head that ends in a dense layer, and notes."""
    activation, outputs = top.table["activation"], weight.shape[1]
    arrays = {"weight": weight, "bias": bias}
    if activation == "sigmoid" and outputs == 1:  # softmax of (0, x) is the logistic function of x
        arrays = {"weight": np.pad(weight, [(0, 0), (1, 0)]), "bias": np.pad(bias, (1, 0))}
        note = f'{top.label} has one output, the probability of the label "1"'
        return Part({"kind": "classify", "labels": _labels(2)}, arrays), [note]
    if activation == "sigmoid":
        return Part({"kind": "classify", "multi_label": True, "labels": _labels(outputs)}, arrays), []
    table = {"kind": "regress", "outputs": outputs}
    if activation != "none":
        return Part({**table, "activation": activation}, arrays), []
    note = f'{top.label} has no activation. If its numbers are logits of labels, set head.kind to "classify"'
    return Part(table, arrays), [note] if outputs > 1 else []


def _with_pool(
    pool: Pooled, dense: list[Layer], head: Part, origins: frozenset[str], notes: list[str]
) -> tuple[Node, Part, frozenset[str], list[str]]:
    """Add the pool and the dense layers to a head."""
    pools = pool.pools[0] if len(pool.pools) == 1 else list(pool.pools)
    table, arrays = {**head.table, "pool": pools, **pool.table}, {**head.arrays, **pool.arrays}
    for index, layer in enumerate(dense):
        arrays |= {f"dense.{index}.{name}": array for name, array in layer.arrays.items()}
        origins |= layer.origins
    if dense:
        table["dense"] = [{key: layer.table[key] for key in ("width", "activation")} for layer in dense]
    return pool.below, Part(table, arrays), origins | pool.origins, notes


def _ending_in_product(node: Node) -> Layer:
    """Return a node that is a product without activation, or a product above it that changes nothing."""
    if isinstance(node, Layer) and node.kind == "dense" and node.table["activation"] == "none":
        return node
    check_matrix(node.width, node.width)
    table = {"kind": "dense", "width": node.width, "activation": "none"}
    return Layer(node, table, {"weight": np.eye(node.width), "bias": np.zeros(node.width)}, node.width, "softmax")


def _dense_above_pool(node: Node) -> tuple[Pooled, list[Layer]]:
    """Return the pool, and the dense layers above it from the lowest upwards."""
    dense: list[Layer] = []
    while isinstance(node, Layer):
        _check_below_softmax(node)
        if node.kind != "dense":
            raise ImportRefused(f"{node.label} follows the pool, where model.toml has only dense layers")
        dense.insert(0, node)
        node = node.below
    assert isinstance(node, Pooled), "a vector comes from a pool"
    return node, _without_factors(dense)


def _without_factors(dense: list[Layer]) -> list[Layer]:
    """Multiply the weights of a layer by the factors of the layer below, if that only has a factor and an offset for each column."""
    kept: list[Layer] = []
    for layer in dense:
        below = kept[-1] if kept else None
        if below is not None and below.table["activation"] == "none" and _is_diagonal(below.arrays["weight"]):
            weight = layer.arrays["weight"]
            arrays = {
                "weight": np.diag(below.arrays["weight"])[:, None] * weight,
                "bias": below.arrays["bias"] @ weight + layer.arrays["bias"],
            }
            layer = replace(layer.changed(arrays=arrays, origins=below.origins), below=below.below)
            kept.pop()
        kept.append(layer)
    return kept


def _is_diagonal(matrix: Array) -> bool:
    return matrix.shape[0] == matrix.shape[1] and bool((matrix == np.diag(np.diag(matrix))).all())


def _layers_above_input(node: Node) -> list[Layer]:
    """Return the layers of a node, from the lowest upwards. A model has at least one: an input alone becomes an identity layer."""
    layers: list[Layer] = []
    while isinstance(node, Layer):
        _check_below_softmax(node)
        layers.insert(0, node)
        node = node.below
    assert isinstance(node, Input), "steps come from the input"
    return layers or [Layer(node, {"kind": "activation", "activation": "none"}, {}, node.width, "the input")]


def _deepened(layers: list[Layer]) -> list[Layer]:
    """Join equal recurrent layers that follow each other to one layer of several levels."""
    joined_layers: list[Layer] = []
    for layer in layers:
        below = joined_layers[-1] if joined_layers else None
        if below is not None and layer.kind in RECURRENT and {**below.table, "depth": 1} == {**layer.table, "depth": 1}:
            depth = below.table.get("depth", 1)
            arrays = {f"{depth}.{name.removeprefix('0.')}": array for name, array in layer.arrays.items()}
            joined_layers[-1] = below.changed(arrays=arrays, origins=layer.origins, depth=depth + 1)
        else:
            joined_layers.append(layer)
    return joined_layers


def _input(node: Node) -> dict[str, Any]:
    first = node
    while isinstance(node, Layer):
        first, node = node, node.below
    assert isinstance(node, Input), "steps come from the input"
    if not node.is_ids:
        return {"kind": "features", "features": node.width}
    if not (isinstance(first, Layer) and first.kind == "embedding"):
        raise ImportRefused("it computes with token ids without looking them up in a table: a model over ids has an embedding")
    return {"kind": "ids", "vocabulary": len(first.arrays["weight"])}


def _in_float32(label: str, part: Part) -> Part:
    """Return a part with new arrays in float32; raises ImportRefused for numbers that are not finite in float32."""
    arrays = {}
    for name, array in part.arrays.items():
        with np.errstate(over="ignore"):
            arrays[name] = np.array(array, np.float32)
        finite = np.isfinite(arrays[name])
        if not finite.all():
            index = tuple(int(i) for i in np.argwhere(~finite)[0])
            raise ImportRefused(
                f"{label}: the weight {name} is {array[index]} at {index}: weights are finite numbers of float32"
            )
    return Part(part.table, arrays)


def _check_order(node: Layer, columns: Columns) -> None:
    if not in_order(columns, node.width):
        raise ImportRefused(f"the output has some of the results of {node.label}: make all of them an output")


def _check_below_softmax(node: Layer) -> None:
    if node.kind in ("softmax", "normalize"):
        raise ImportRefused(f"{node.label} is followed by other operations: model.toml has it only at the end")


def _softmax_notes(node: Layer) -> list[str]:
    return (
        [f"{node.label} returns logarithms of probabilities, and the model answers the probabilities"]
        if node.table["log"]
        else []
    )


def _labels(count: int) -> list[str]:
    return [str(label) for label in range(count)]
