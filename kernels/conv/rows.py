"""The rows of a batch and a convolution's windows of them, as the sizes that `Rows` of conv.cuh is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kernels.conv.thinning import Thinned

BANKS = 8
"""Widths that one launch takes."""


class Windows(NamedTuple):
    """padding: steps before and after each row; thinned: which steps of each row come in, and thinned_out, which windows go out; wide:
    offsets have 64 bits."""

    rows: int
    tokens: int
    padding: tuple[int, int]
    dilation: int
    stride: int
    thinned: Thinned
    thinned_out: Thinned
    wide: bool

    def numbers(self, gap: int = 0) -> list[int]:
        """gap: places between the windows of two rows."""
        every, out = self.thinned.every, self.thinned_out
        left, right = self.padding
        stride = apart(self.thinned, out) if out.most else self.stride
        return [self.wide, self.rows, self.thinned.most, every, gap, out.most, out.every, left // every, right, stride]


def apart(inner: Thinned, outer: Thinned) -> int:
    """How many of the inner steps each of the outer ones is from the next."""
    return max(1, outer.every // inner.every) if outer.most > 1 else 1


def most_windows(tokens: int, rows: int, padding: int, reach: int, stride: int) -> int:
    """As many as can come out of so many steps in so many rows."""
    return (tokens + rows * max(0, padding - reach + stride)) // stride


def of_banks(*members: Sequence[int]) -> list[int]:
    """Arrays of a Call that have a place for each bank, one after the other."""
    return [value for values in members for value in (*values, *[0] * (BANKS - len(values)))]
