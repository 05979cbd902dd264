"""The launcher of `cpu_loops.text_cnn`: a text CNN over folded tables in one call, from token ids to the classifier's scores.

A text CNN over vectors runs layer by layer in `cpu_stack`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_

import torch
from torch import Tensor

from kernels.conv.cpu_stack import ROW_OPERATIONS, conv, packed_layer
from kernels.conv.layer_by_layer import text_cnn_of
from kernels.conv.types import ConvWeights
from kernels.cpu.conv_numbers import ClassifierNumbers
from kernels.cpu.launch import FLOAT_BYTES, LONG_BYTES, aligned, loops
from kernels.cpu.storage import panel_storage
from kernels.cpu.threads import run_in_parts
from kernels.launching import address
from kernels.ragged import Encoded, Ragged

MONOTONE = ("none", "relu")
"""Activations that may follow the maximum over time, because they never decrease."""
TILE_FLOATS = 128
"""Numbers of the largest tile."""

Classifier = tuple[Tensor, Tensor]
_layer_by_layer = text_cnn_of(conv)


@dataclass(frozen=True, slots=True)
class TextTables:
    """The layers and the classifier of a text CNN as the compiled loop takes them.

    layers, classifier: what was packed; numbers: a `LayerNumbers` for each layer; padding: the most steps of padding; row_numbers:
    numbers of the table rows of one token; arrays: what the addresses refer to.
    """

    layers: tuple[ConvWeights, ...]
    classifier: Classifier | None
    numbers: array[int]
    outputs: int
    scoring: ClassifierNumbers
    padding: int
    row_numbers: int
    arrays: tuple[Tensor, ...]


def text_cnn(x: Ragged, layers: Sequence[ConvWeights], classifier: Classifier | None) -> Encoded:
    """Run all layers over every row and pool each by its maximum. Shapes as in `kernels.conv.text_cnn`."""
    if not all(layer.tables is not None and layer.activation in MONOTONE for layer in layers):
        return _layer_by_layer(x, layers, classifier)
    packed, rows, tokens = _packed(layers, classifier), x.rows, x.data.shape[0]
    ids, offsets = x.data.contiguous(), x.offsets.contiguous()
    maxima = torch.empty(rows, packed.outputs)
    scores = torch.empty(rows, packed.scoring.columns) if classifier is not None else None
    run_in_parts(
        loops("kernels.conv.cpu_loops").text_cnn,
        (
            (offsets.data_ptr(), offsets.itemsize, rows, tokens, 0),
            *(ids.data_ptr(), ids.itemsize, packed.numbers.buffer_info()[0], len(layers), packed.outputs, maxima.data_ptr()),
            *(packed.scoring, address(scores)),
        ),
        rows,
        tokens * packed.row_numbers * ROW_OPERATIONS,
        aligned(FLOAT_BYTES * TILE_FLOATS + LONG_BYTES * max(tokens + packed.padding, rows)),
    )
    if scores is not None and classifier is not None:
        scores = scores[:, : classifier[0].shape[1]]
    return Encoded(None, max=maxima, scores=scores)


def _packed(layers: Sequence[ConvWeights], classifier: Classifier | None) -> TextTables:
    packed: TextTables | None = layers[0].packed.get("cpu")
    same = packed is not None and packed.classifier is classifier and all(map(is_, packed.layers, layers))
    if packed is None or not same or len(packed.layers) != len(layers):
        packed = layers[0].packed["cpu"] = _pack(tuple(layers), classifier)
    return packed


def _pack(layers: tuple[ConvWeights, ...], classifier: Classifier | None) -> TextTables:
    from kernels.cpu.products import pack_bias, pack_columns, padded, product_width

    of_layers = [packed_layer(layer) for layer in layers]
    arrays = [tensor for layer in of_layers for tensor in layer.arrays]
    scoring = ClassifierNumbers()
    if classifier is not None:
        weight, bias = classifier
        storage = panel_storage(weight, int8=False)
        panels, packed_bias = pack_columns(weight, 1, storage), pack_bias(bias, 1)
        columns = product_width(padded(weight.shape[1]))
        scoring = ClassifierNumbers(storage, panels.data_ptr(), packed_bias.data_ptr(), columns)
        arrays += [panels, packed_bias]
    return TextTables(
        layers,
        classifier,
        array("q", chain.from_iterable(layer.numbers for layer in of_layers)),
        sum(layer.outputs for layer in layers),
        scoring,
        padding=max(layer.left + layer.right for layer in layers),
        row_numbers=sum(layer.shape[0] * layer.outputs for layer in layers),
        arrays=tuple(arrays),
    )
