"""The arithmetic of the recurrences of the SRU and the QRNN, and the number of each form for loops on a CPU. Imports no tensor library."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

NO_SKIP, SKIP_BLOCK, SKIP_COLUMNS = range(3)
CANDIDATES = TANH, IDENTITY, POSITIVE = "tanh", "identity", "positive"
"""The activations of a candidate; positive(v) is v + 0.5 from 0 on, and sigmoid(v) below. With two blocks, a QRNN may have any;
otherwise it has tanh."""


class ScanForm(NamedTuple):
    """The arithmetic of a layer, independent of its size.

    blocks: gate blocks; sru: an SRU rather than a QRNN; own_cell: the gates depend on the previous cell; skip: NO_SKIP,
    SKIP_BLOCK or SKIP_COLUMNS; tanh: of the cell; activation: of a QRNN's candidate, its place among CANDIDATES.
    """

    blocks: int
    sru: bool = False
    own_cell: bool = False
    skip: int = NO_SKIP
    tanh: bool = False
    activation: int = 0

    @property
    def early(self) -> int:
        """The gate blocks that decide the cell: candidate, forget and, in ifo-pooling, input."""
        return 2 if self.sru else max(2, self.blocks - 1)

    @property
    def late(self) -> int:
        """The gate blocks that only decide the hidden vector, without a skip."""
        return 1 if self.sru else self.blocks - self.early

    @property
    def with_skip_block(self) -> ScanForm:
        """The form of loops on a CPU, which copy a skip of columns to a block."""
        return self._replace(blocks=4, skip=SKIP_BLOCK) if self.skip else self

    @property
    def number(self) -> int:
        """The place of `with_skip_block` among FORMS."""
        return FORMS.index(self.with_skip_block)


FORMS = (
    *(
        ScanForm(3 + skip, True, own_cell, SKIP_BLOCK if skip else NO_SKIP, tanh)
        for own_cell, tanh, skip in product((False, True), repeat=3)
    ),
    *(ScanForm(blocks) for blocks in (2, 3, 4)),
    *(ScanForm(2, activation=number) for number in range(1, len(CANDIDATES))),
)
