"""The launcher of `cpu_loops.text_cnn`: a text CNN over folded tables in one call, from token ids to the classifier's scores.

A text CNN over vectors runs layer by layer in `cpu_stack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor

from kernels.conv.cpu_stack import ROW_OPERATIONS, conv, stored_tables
from kernels.conv.layer_by_layer import text_cnn_of
from kernels.conv.types import ConvWeights
from kernels.cpu.launch import FLOAT_BYTES, LONG_BYTES, aligned, loops
from kernels.cpu.storage import STORAGES, panel_storage
from kernels.cpu.threads import run_in_parts
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

    layers, classifier: what was packed; arguments: the address of the layers' numbers, how many layers there are and their
    outputs; scoring: the storage, the addresses of the classifier's panels and bias, and the width of a row of scores, or
    zeros; padding: the most steps of padding; row_numbers: numbers of the table rows of one token; arrays: what the addresses
    refer to.
    """

    layers: tuple[ConvWeights, ...]
    classifier: Classifier | None
    numbers: int
    outputs: int
    scoring: tuple[int, ...]
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
    storage, panels, bias, width = packed.scoring
    scores = torch.empty(rows, width) if panels else None
    run_in_parts(
        loops("kernels.conv.cpu_loops").text_cnn,
        (
            *(offsets.data_ptr(), offsets.itemsize, rows, ids.data_ptr(), ids.itemsize),
            *(packed.numbers, len(layers), packed.outputs, maxima.data_ptr()),
            *(storage, panels, bias, 0 if scores is None else scores.data_ptr(), width),
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

    arrays: list[Tensor] = []
    numbers, column = [], 0
    for layer in layers:
        table, bias = stored_tables(layer), layer.bias.float().contiguous()
        arrays += [table, bias]
        geometry = len(table), layer.dilation, layer.stride, layer.left, layer.right
        numbers += [table.data_ptr(), STORAGES[table.dtype], table.stride(0), table.stride(1), table.shape[1], *geometry]
        numbers += [layer.outputs, column, bias.data_ptr(), int(layer.activation == "relu")]
        column += layer.outputs
    arrays.append(torch.tensor(numbers, dtype=torch.int64))
    scoring = 0, 0, 0, 0
    if classifier is not None:
        weight, bias = classifier
        storage = panel_storage(weight, int8=False)
        panels, packed_bias = pack_columns(weight, 1, storage), pack_bias(bias, 1)
        scoring = storage, panels.data_ptr(), packed_bias.data_ptr(), product_width(padded(weight.shape[1]))
        arrays += [panels, packed_bias]
    return TextTables(
        layers,
        classifier,
        arrays[2 * len(layers)].data_ptr(),
        column,
        scoring,
        padding=max(layer.left + layer.right for layer in layers),
        row_numbers=sum(layer.shape[0] * layer.outputs for layer in layers),
        arrays=tuple(arrays),
    )
