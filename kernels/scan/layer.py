"""The description of a layer for the scan kernels: the source of its gates, and the arrays of each direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.scan.forms import ScanForm


class GateSource(NamedTuple):
    """The source of the gates.

    product: the kernel multiplies the inputs; otherwise it reads gate inputs. window: steps of the product or of a sum of tables;
    gather: gate inputs are table rows, selected by ids; float32: of the gate inputs; piece_bytes: alignment of the gate inputs' rows.
    """

    product: bool
    window: int
    gather: bool = False
    float32: bool = False
    piece_bytes: int = 16


class ScanVariant(NamedTuple):
    """The properties that a kernel is specialised for, except its launch shape. all_steps: outputs depend on every step."""

    device: int
    storage: torch.dtype
    form: ScanForm
    gates: GateSource
    directions: int
    hidden: int
    inputs: int
    skip_float32: bool
    all_steps: bool


@dataclass(frozen=True, slots=True)
class Direction:
    """The arrays of one direction.

    bias: (blocks x hidden,) and own_cell: (2 x hidden,), float32. source: gate inputs or tables, for kernels that read them; otherwise
    data: (tokens, inputs), the weights of the product, (window x inputs, blocks x hidden), and `packed`, where their packed form is
    kept. left: the steps before each row; left_after: receives the steps before its next chunk. before: the cells that the rows start from;
    with slots, a state cache that also receives the new cells, in these slots; sources: the slots that the rows start from, if they
    differ. skip_from, scale: of a skip of SKIP_COLUMNS.
    """

    bias: Tensor
    source: Tensor | None = None
    data: Tensor | None = None
    weights: Tensor | None = None
    packed: dict[Any, Tensor] = field(default_factory=dict)
    own_cell: Tensor | None = None
    left: Tensor | None = None
    left_after: Tensor | None = None
    before: Tensor | None = None
    slots: Tensor | None = None
    sources: Tensor | None = None
    skip_from: int = 0
    scale: float = 1.0


def product_gates(window: int) -> GateSource:
    """Return the source of gates that the kernel computes as a product of the inputs."""
    return GateSource(product=True, window=window)


def array_gates(arrays: Sequence[Tensor], hidden: int, *, window: int = 1, gather: bool = False) -> GateSource:
    """Return the source of gates in these arrays, an array for each direction. gather: the arrays are tables."""
    size = arrays[0].element_size()
    piece_bytes = math.gcd(hidden * size, *(array.data_ptr() for array in arrays), 16)
    return GateSource(False, window, gather, arrays[0].dtype == torch.float32, piece_bytes)
