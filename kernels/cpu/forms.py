"""The forms of the recurrences of the SRU and the QRNN, by number, for compiled code."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple


class LoopForm(NamedTuple):
    """early, late: the numbers of gate blocks that decide the cell, and that only decide the hidden vector; own_cell: the old
    cell is in the gates; tanh: of the cell, in the hidden vector."""

    early: int
    late: int
    sru: bool = False
    own_cell: bool = False
    tanh: bool = False
    skip: bool = False


SRU_FORMS = tuple(LoopForm(2, 1, True, *flags) for flags in product((False, True), repeat=3))
QRNN_FORMS = {"f": LoopForm(2, 0), "fo": LoopForm(2, 1), "ifo": LoopForm(3, 1)}
FORMS = (*SRU_FORMS, *QRNN_FORMS.values())
