"""The rule by which an embedding and the first product of the layer above it become one table when a model is loaded."""

from __future__ import annotations

MAX_TABLE_NUMBERS = 64 << 20
"""The most numbers in the tables of one model: 256 MiB in float32."""


def is_folded(vocabulary: int, columns: int) -> bool:
    """Return whether the embedding is folded. columns: the numbers that the tables have for each token id.

    The rule knows only sizes, so that a model computes alike on every machine, and its sessions fit every replica.

    A folded token costs reading `columns` numbers. An embedded one costs reading a row, and multiplying it with as many columns. The
    tables were faster for every kind of layer in batches of 16 and 64 tokens, and in batches of 2,000 whose ids are as frequent as words.
    Only their size speaks against them: they may have many times the numbers of the embedding. So the size is bounded, and nothing else.

    An embedding of 8 or 16 columns with ids that are all equally frequent may lose: its batches of 2,000 tokens took up to twice the time,
    because every row of the tables came from memory. `fold = "never"` in model.toml is for such a model.
    """
    return vocabulary * columns <= MAX_TABLE_NUMBERS
