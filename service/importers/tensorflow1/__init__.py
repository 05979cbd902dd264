"""Imports variables of TensorFlow 1 from an .npz: cells of tf.nn.rnn_cell, and the canonical weights of tf.contrib.cudnn_rnn.

Variables have names and shapes, and no graph. Without `[[layers]]` in the recipe, the embedding, the only recurrent layer and the dense
layers are found by their names and sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from service.importers.draft import Draft, ImportRefused, Part
from service.importers.ends import chained, model_input, tried_recipe, usual_head
from service.importers.recipe import FROM, Recipe
from service.importers.tensorflow1.cells import adds_forget_bias, recurrent
from service.importers.tensorflow1.variables import KINDS, LayerVariables, read_layers, within

FORGET_BIAS = "forget_bias"
"""A key of an LSTM in a recipe: the number that its cells add to the bias of the forget gate. 1.0 in TensorFlow."""
MATRICES = {"embedding": 2, "dense": 2, "conv": 3}
"""Layers with one matrix or filter, and how many axes it has."""
Entry = tuple[dict[str, Any], LayerVariables | None]
"""A table of the recipe, and the layer with its variables."""


def read(file: Path, recipe: Recipe) -> Draft:
    """Return the model of variables; raises ImportRefused for variables or a recipe that do not make a model."""
    found = read_layers(file)
    assumed: list[str] = []
    entries, dense, linear = _from_recipe(recipe, found) if recipe.layers else _suggested(found, recipe, assumed)
    layers = [_layer(table, layer, assumed) for table, layer in entries]
    parts = [_layer({"kind": "dense", **options}, layer, assumed) for options, layer in dense]
    head, of_head = usual_head(recipe, layers, parts, None if linear is None else _matrix_layer({}, linear), {})
    kinds = [part.table.get("kind") for part in layers]
    places = [(layer, f"layers.{index} ({kinds[index]})") for index, (_, layer) in enumerate(entries)]
    places += [(layer, "head") for layer in [*(layer for _, layer in dense), linear]]
    used = {name: place for layer, place in places if layer is not None for name in layer.names}
    unused = [name for layer in found.values() for name in layer.names if name not in used]
    tables, of_dense = ([{**_from(layer), **table} for table, layer in pairs] for pairs in (entries, dense))
    tried = tried_recipe(recipe, head, tables, of_dense, _from(linear))
    assumed += of_head
    return Draft(
        "TensorFlow 1 variables", model_input(layers, recipe), layers, head, used, unused, assumed=assumed, tried=tried
    )


def _from(layer: LayerVariables | None) -> dict[str, Any]:
    """Return the keys of a recipe that a layer needs."""
    return {} if layer is None else {FROM: layer.name, **({FORGET_BIAS: 1.0} if adds_forget_bias(layer) else {})}


def _from_recipe(recipe: Recipe, found: Mapping[str, LayerVariables]) -> tuple[list[Entry], list[Entry], LayerVariables | None]:
    entries, dense = ([_entry(table, found) for table in tables] for tables in (recipe.layers, recipe.dense))
    return entries, dense, None if recipe.head_from is None else within(found, recipe.head_from)


def _entry(table: Mapping[str, Any], found: Mapping[str, LayerVariables]) -> Entry:
    kept = {key: value for key, value in table.items() if key != FROM}
    needs = kept.get("kind", "dense") in (*KINDS.values(), *MATRICES)
    if needs and FROM not in table:
        raise ImportRefused(f"a {kept.get('kind')} layer of the recipe needs `from`: the layers are {', '.join(found)}")
    return kept, within(found, table[FROM]) if FROM in table else None


def _suggested(
    found: Mapping[str, LayerVariables], recipe: Recipe, assumed: list[str]
) -> tuple[list[Entry], list[Entry], LayerVariables | None]:
    """Return the layers that the sizes suggest: an embedding, which has no bias, one recurrent layer, and dense layers in a row."""
    recurrent_layers = [layer for layer in found.values() if layer.cells]
    embeddings = [layer for layer in found.values() if not layer.cells and "bias" not in layer.variables]
    others = [layer for layer in found.values() if not layer.cells and layer not in embeddings]
    if len(recurrent_layers) != 1 or len(embeddings) > 1 or any(layer.matrix.ndim != 2 for layer in embeddings + others):
        raise ImportRefused(
            f"write a recipe with [[layers]], because the file does not define their order: it has {', '.join(found)}"
        )
    chain = chained(others, lambda layer: layer.matrix.shape)
    entries: list[Entry] = [({"kind": "embedding"}, layer) for layer in embeddings]
    entries += [({"kind": KINDS[next(iter(recurrent_layers[0].cells.values())).kind]}, recurrent_layers[0])]
    assumed += [f"head.dense ({layer.name}): relu; other activations fit too" for layer in chain[:-1]]
    if embeddings or chain:
        names = " > ".join(layer.name for layer in (*embeddings, *recurrent_layers, *chain))
        assumed.append(f"{names}: layers in this order, each on the output of the previous layer; others fit too")
    return entries, [({"activation": "relu"}, layer) for layer in chain[:-1]], chain[-1] if chain else None


def _layer(table: dict[str, Any], layer: LayerVariables | None, assumed: list[str]) -> Part:
    """Return a layer of model.toml; raises ImportRefused for variables that do not make a layer."""
    if layer is None:
        return Part(table)
    if not layer.cells:
        return _matrix_layer(table, layer)
    table = dict(table)
    given = table.pop(FORGET_BIAS, None)
    if given is None and adds_forget_bias(layer):
        assumed.append(f"{layer.name}: {FORGET_BIAS} = 1.0, which the cells add; a key of the recipe")
    try:
        return recurrent(table, layer, 1.0 if given is None else float(given))
    except (ValueError, LookupError, TypeError) as error:
        raise ImportRefused(f"{layer.name}: its variables do not fit together ({error}): {_shapes(layer)}") from error


def _matrix_layer(table: dict[str, Any], layer: LayerVariables) -> Part:
    kind, matrix = table.get("kind", "dense"), layer.matrix
    if matrix.ndim != MATRICES.get(kind):
        raise ImportRefused(f"{layer.name} has the shape {matrix.shape}, and no {kind} layer has it")
    width = matrix.shape[-1]
    if kind == "embedding":
        return Part({**table, "width": width}, {"weight": matrix})
    bias = layer.variables.get("bias", np.zeros(width, np.float32))
    if kind == "conv":
        return Part({**table, "filters": width, "width": len(matrix)}, {"filters": matrix, "bias": bias})
    return Part({**table, "width": width}, {"weight": matrix, "bias": bias})


def _shapes(layer: LayerVariables) -> str:
    shapes = {leaf: array.shape for cell in layer.cells.values() for leaf, array in cell.variables.items()}
    return ", ".join(f"{leaf} {shape}" for leaf, shape in shapes.items())
