"""Stacks of convolutions and text CNNs for the tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.conv.types import ConvBlock
from tests.kernels.stacks import Maker, Stack, TextCNN

WIDTHS = (5, 1, 3, 3, 5, 1, 1, 5, 3)
MAPS = (40, 1, 65, 3, 130, 64, 8, 100, 33)
"""Widths of the filters of a text CNN, and their numbers."""
Make = Callable[[Maker], tuple[ConvBlock, ...]]


def tcn(maker: Maker) -> tuple[ConvBlock, ...]:
    return maker.tcn([40, 33, 33], width=3)


def gated(maker: Maker) -> tuple[ConvBlock, ...]:
    """A plain block, then a block with a residual and an activation after it."""
    first = maker.causal(50, 3, activation="glu")
    inner = maker.causal(33, 3, dilation=4, activation="gated_tanh"), maker.layer(50, 1)
    return ConvBlock((first,)), ConvBlock(inner, residual=True, activation="gelu"), ConvBlock((maker.causal(3, 3),))


def centred(maker: Maker) -> tuple[ConvBlock, ...]:
    """A centred layer below a causal layer. The needed steps of the causal layer are not adjacent."""
    first = maker.layer(64, 3, left=1, right=1, activation="relu")
    second = maker.layer(40, 3, left=1, right=3, dilation=2, activation="gelu")
    return ConvBlock((first, second), residual=True), ConvBlock((maker.causal(5, 3, dilation=2, activation="relu"),))


def strided(maker: Maker) -> tuple[ConvBlock, ...]:
    """A block with fewer output steps than input steps, then a block with a residual."""
    first = ConvBlock((maker.layer(64, 3, left=1, stride=2), maker.layer(40, 3, activation="relu")))
    return first, ConvBlock((maker.causal(40, 3, activation="relu"),), residual=True, activation="relu")


def embedding(maker: Maker) -> tuple[ConvBlock, ...]:
    return ConvBlock((maker.causal(40, 3, ids="embedding", activation="relu"),)), *maker.tcn([40, 3], width=3)


def tables(maker: Maker) -> tuple[ConvBlock, ...]:
    return ConvBlock((maker.causal(40, 3, ids="tables", activation="relu"),)), *maker.tcn([40, 3], width=3)


def gated_tables(maker: Maker) -> tuple[ConvBlock, ...]:
    """A gated layer over tables, which no kernel supports."""
    return (ConvBlock((maker.causal(40, 3, ids="tables", activation="glu"), maker.causal(3, 3))),)


KEEP_STEPS: tuple[Make, ...] = (tcn, gated, centred, embedding, tables)


def narrow(problem: Any, dtype: torch.dtype = torch.float16) -> Any:
    """Return a problem with all numbers except ids and offsets in this dtype."""
    return problem.map_arrays(lambda array: array.to(dtype) if array.is_floating_point() else array)


def stacked(make: Make, lengths: Sequence[int], *, states: bool = False, dtype: torch.dtype = torch.float16) -> Stack:
    """Return a problem on the CPU."""
    maker = Maker(40)
    problem: Stack = narrow(maker.stack(lengths, *make(maker), with_states=states), dtype)
    return problem


def text(
    ids: str, lengths: Sequence[int], widths: int, *, dtype: torch.dtype = torch.float16, first: int = 0, **options: Any
) -> TextCNN:
    """Return a problem on the CPU with this number of widths from the first one on. options: of its layers, and the number of labels."""
    until = first + widths
    made: TextCNN = narrow(Maker(40).text_cnn(lengths, WIDTHS[first:until], MAPS[first:until], ids=ids, **options), dtype)
    return made
