"""How compiled code learns about the layers of a stack of convolutions: tuples of numbers. Imports neither Numba nor torch."""

from __future__ import annotations

from typing import NamedTuple

NONE, RELU, TANH, GELU, GLU, GATED_TANH = range(6)
ACTIVATION_NUMBERS = {"none": NONE, "relu": RELU, "tanh": TANH, "gelu": GELU, "glu": GLU, "gated_tanh": GATED_TANH}
BUFFERS = 3
"""Arrays for the steps between layers: the input of a block, the input of a layer and its output."""


class LayerNumbers(NamedTuple):
    """One layer.

    together: windows of a product; inputs, outputs: numbers of an input and of an output step. panels, bias, columns: the packed filters
    and the numbers of a row of their product, in which the gates begin at `gates`. A layer that takes ids has no panels: table is the
    address of its tables, (width, height, maps), with `row_numbers` numbers from row to row and `tap_numbers` from tap to tap. storage:
    of the panels or the table.

    begins_block: 1 for the first layer of a block; adds_input: 1 for the last layer of a block with a residual. The input of the block
    then has `block_inputs` numbers of a step, and projection has the panels of its projection if `projects` is 1.
    """

    together: int = 0
    width: int = 0
    inputs: int = 0
    outputs: int = 0
    left: int = 0
    right: int = 0
    dilation: int = 0
    stride: int = 0
    activation: int = 0
    storage: int = 0
    panels: int = 0
    bias: int = 0
    columns: int = 0
    gates: int = 0
    takes_ids: int = 0
    table: int = 0
    tap_numbers: int = 0
    row_numbers: int = 0
    height: int = 0
    begins_block: int = 0
    adds_input: int = 0
    block_activation: int = 0
    block_inputs: int = 0
    projects: int = 0
    projection_storage: int = 0
    projection: int = 0
    projection_bias: int = 0
    projection_columns: int = 0


class CallNumbers(NamedTuple):
    """What a call adds to a layer.

    before, after: the addresses of the states before and after the call, (rows or slots, left, inputs), or 0; sources, slots: of the slots
    that the rows start from and that they write, or 0 if a row's slot is its number. needed, spacing: only the last `needed` output steps
    of each row that are `spacing` apart are computed; 0 for all steps.
    """

    before: int = 0
    sources: int = 0
    after: int = 0
    slots: int = 0
    needed: int = 0
    spacing: int = 1


class ClassifierNumbers(NamedTuple):
    """A linear layer over the maxima of a text CNN: its packed weights, and the numbers of a row of scores."""

    storage: int = 0
    panels: int = 0
    bias: int = 0
    columns: int = 0


class MemorySizes(NamedTuple):
    """The scratch memory of a part of a batch, in numbers: windows of a product, table rows of the steps of a row, float32 numbers of
    copied windows, of a product, of a projection, and of one of the BUFFERS."""

    together: int
    table_rows: int
    windows: int
    tile: int
    projected: int
    buffer: int
