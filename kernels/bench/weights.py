"""Random weights of a workload, scaled so that gates neither vanish nor saturate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kernels.bench.workload import (
    DILATIONS,
    EMBEDDED,
    ENCODER,
    IDS,
    INT8,
    LONG_MEMORY,
    STACKS,
    TEMPORAL_WIDTH,
    VOCABULARY,
    Workload,
)
from kernels.conv.types import ConvBlock, ConvWeights
from kernels.embedding import FIRST, fold_taps
from kernels.family import Family
from kernels.qrnn.types import QRNNWeights
from kernels.quantized import dequantize, quantize
from kernels.ragged import STORAGE
from kernels.sru.types import SRUWeights

Normal = Callable[..., Tensor]
STORED = STORAGE | {INT8: torch.float32}
"""Dtypes of data and weights, by the dtype of a workload."""


def weights(workload: Workload, normal: Normal) -> tuple[Any, ...]:
    """Return the layers of a workload, or the directions of each level of an encoder.

    normal: returns a random array of a shape, times `scale`.
    """
    if workload.kind == ENCODER:
        levels = [replace(workload, kind="layer", inputs=inputs) for inputs in workload.level_inputs]
        return tuple(tuple(weights(level, normal)[0] for _ in range(workload.directions)) for level in levels)
    layers = MAKERS.get(workload.family, _gated)(workload, normal)
    return tuple(map(_as_int8, layers)) if workload.dtype == INT8 else layers


def _as_int8(layer: Any) -> Any:
    """Return a recurrent layer whose products take int8 weights, with the values of these weights."""
    matrices = {name: getattr(layer, name, None) for name in ("input", "recurrent")}
    return replace(
        layer, int8=True, **{name: dequantize(*quantize(matrix)) for name, matrix in matrices.items() if matrix is not None}
    )


def family_of(workload: Workload) -> Family:
    """Return the family of a recurrent workload."""
    family: Family = import_module(f"kernels.{workload.family}").FAMILY
    return family


def _gated(workload: Workload, normal: Normal) -> tuple[Any, ...]:
    """The data of a recurrence are gate inputs; the data of a folded layer select gate inputs from a table."""
    inputs, hidden, family = workload.inputs, workload.hidden, family_of(workload)
    columns = len(family.gates) * hidden
    arrays: dict[str, Tensor | None] = {"input": None, "bias": None}
    if workload.kind not in ("recurrence", "folded"):
        arrays = {"input": normal(inputs, columns, scale=inputs**-0.5), "bias": normal(columns)}
    arrays["recurrent"] = normal(hidden, columns, scale=hidden**-0.5)
    arrays["table"] = normal(inputs, columns) if workload.kind == "folded" else None
    own = {"recurrent_bias": normal(hidden)} if workload.family == "gru" else {}
    return (family.weights(**arrays, **own),)


def _sru(workload: Workload, normal: Normal) -> tuple[SRUWeights, ...]:
    """Over token ids, the skip is the fourth block of a table; otherwise it is the data."""
    inputs, hidden = workload.inputs, workload.hidden
    bias, cell = normal(2 * hidden), normal(2 * hidden, scale=0.5) if workload.form == "v2" else None
    if workload.form == LONG_MEMORY:
        bias[:hidden] += 4
    if workload.kind == "folded":
        return (SRUWeights(input=None, bias=bias, cell=cell, table=normal(inputs, 4 * hidden)),)
    return (SRUWeights(input=normal(inputs, 3 * hidden, scale=inputs**-0.5), bias=bias, cell=cell, skip_from=0),)


def _qrnn(workload: Workload, normal: Normal) -> tuple[QRNNWeights, ...]:
    """Over token ids, the rows of the tables before the first id are padding, and zero."""
    inputs, hidden = workload.inputs, workload.hidden
    kind, columns = family_of(workload).weights, len(family_of(workload).gates) * hidden
    bias, window = normal(columns), workload.window
    if workload.kind == "folded":
        tables = normal(window, FIRST + inputs, columns, scale=window**-0.5)
        tables[:, :FIRST] = 0
        return (kind(input=None, bias=bias, tables=tables),)
    return (kind(normal(window, inputs, columns, scale=(window * inputs) ** -0.5), bias),)


def _conv(workload: Workload, normal: Normal) -> tuple[ConvWeights | ConvBlock, ...]:
    """A text CNN uses whole windows, a dense layer returns every step. All layers over token ids share one embedding."""
    if workload.kind in STACKS:
        return _temporal(workload, normal)
    embedding = normal(VOCABULARY, workload.inputs) if workload.kind in IDS else None

    def convolution(width: int) -> ConvWeights:
        around = width // 2 if workload.kind == "dense-conv" else 0
        filters = normal(width, workload.inputs, workload.outputs, scale=(width * workload.inputs) ** -0.5)
        layer = ConvWeights(
            filters, normal(workload.outputs), left=around, right=around, activation="relu", embedding=embedding
        )
        if embedding is None or workload.form == EMBEDDED:
            return layer
        return replace(layer, embedding=None, tables=fold_taps(embedding, filters))

    return tuple(convolution(width) for width in workload.widths)


def _temporal(workload: Workload, normal: Normal) -> tuple[ConvBlock, ...]:
    """Causal layers, with a residual connection around each two (Bai et al. 2018)."""

    def convolution(dilation: int) -> ConvWeights:
        filters = normal(TEMPORAL_WIDTH, workload.inputs, workload.hidden, scale=(TEMPORAL_WIDTH * workload.inputs) ** -0.5)
        left = (TEMPORAL_WIDTH - 1) * dilation
        return ConvWeights(filters, normal(workload.hidden), left=left, dilation=dilation, activation="relu")

    layers = [convolution(dilation) for dilation in DILATIONS]
    return tuple(ConvBlock(pair, residual=True, activation="relu") for pair in zip(layers[::2], layers[1::2], strict=True))


MAKERS: dict[str, Callable[[Workload, Normal], tuple[Any, ...]]] = {"sru": _sru, "qrnn": _qrnn, "mingru": _qrnn, "conv": _conv}
"""The functions that make the weights of families other than the LSTM and the GRU."""
