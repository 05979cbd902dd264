"""Interprets the masks of padded batches. A model computes each sequence by itself, so it has no padding to mask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from service.importers.chain.nodes import Pooled
from service.importers.chain.signal import Signal
from service.importers.chain.values import Constant, Lengths, Mask, Value
from service.importers.draft import ImportRefused
from service.importers.onnx.operation import Operation


def steps_below(operation: Operation, positions: Constant, lengths: Lengths) -> Mask:
    """Return the mask of the positions 0, 1, 2, ... that are less than the lengths."""
    if operation.node.op_type == "Less" and positions.array.size == 1 and positions.array == lengths.plus == 0:
        return Mask(0)
    steps = operation.reading.steps + lengths.plus
    if operation.node.op_type != "Less" or not np.array_equal(positions.array.ravel(), np.arange(steps)):
        raise ImportRefused("it compares lengths to something else than the positions of all steps")
    operation.reading.masks = operation.reading.lengths = True
    return Mask(steps)


def without_padding(operation: Operation) -> Value:
    """Replace padding by a number."""
    mask, x, fill = (operation.inputs[index] if operation.has(index) else None for index in range(3))
    if not isinstance(mask, Mask) or not isinstance(x, Signal) or not isinstance(fill, Constant) or fill.array.size != 1:
        raise ImportRefused("it chooses between numbers by something else than lengths of sequences, which cannot be imported")
    if mask.steps and x.shape[x.steps_axis] != mask.steps:
        raise ImportRefused(f"its mask has {mask.steps} steps, and its input {x.shape[x.steps_axis]}")
    return x


def mean_of_sum(operation: Operation, x: Signal, lengths: Lengths) -> Value:
    """Divide the sum of all steps by the number of steps."""
    if (
        operation.node.op_type != "Div"
        or lengths.plus
        or not all(isinstance(part, Pooled) and part.pools == ("sum",) for part in x.parts)
    ):
        raise ImportRefused("it computes with lengths, and only a sum of all steps can be divided by them")
    return x.map_parts(lambda part: replace(part, pools=("mean",)) if isinstance(part, Pooled) else part)
