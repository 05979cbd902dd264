"""Packed filters compared with a loop over every value."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kernels.conv.packing import DEPTH, STRIP, packed_bias, packed_filters
from kernels.conv.types import GATED, ConvWeights
from tests.kernels.families import Form

every_tile = pytest.mark.parametrize("maps", [64, 128])
every_activation = pytest.mark.parametrize("activation", ["relu", "glu", "gated_tanh"])
every_size = pytest.mark.parametrize("width, inputs, outputs", [(1, 1, 1), (3, 64, 64), (2, 65, 33), (4, 130, 70)])


def weights_of(width: int, inputs: int, outputs: int, activation: str) -> ConvWeights:
    made: ConvWeights = (
        Form("conv", width=width, activation=activation).arguments([], outputs, inputs, storage=torch.float16).weights
    )
    return made


def source_of(weights: ConvWeights, number: int) -> int | None:
    """Return the map of the weights at a packed position, or None for padding. The second half of a strip has gates."""
    strip, place = divmod(number, STRIP)
    if weights.activation not in GATED:
        return number if number < weights.outputs else None
    output = strip * STRIP // 2 + place % (STRIP // 2)
    if output >= weights.outputs:
        return None
    return output if place < STRIP // 2 else weights.outputs + output


@every_tile
@every_activation
@every_size
def test_packed_filters_are_swizzled_rows_of_each_map(
    width: int, inputs: int, outputs: int, activation: str, maps: int
) -> None:
    weights = weights_of(width, inputs, outputs, activation)
    packed = packed_filters(weights, maps)
    tiles, chunks = -(-len(weights.bias) // maps), -(-inputs // DEPTH)
    expected = torch.zeros(tiles, chunks, width, maps, 8, 8, dtype=torch.float16)
    sources = [(number, source) for number in range(tiles * maps) if (source := source_of(weights, number)) is not None]
    for (number, source), tap, chunk, piece in product(sources, range(width), range(chunks), range(8)):
        tile, row = divmod(number, maps)
        values = weights.filters[tap, chunk * DEPTH + piece * 8 :, source][:8]
        expected[tile, chunk, tap, row, piece ^ row % 8, : len(values)] = values
    assert len(sources) == len(weights.bias), "each map has one position"
    assert torch.equal(packed, expected)
    assert packed.is_contiguous()


@every_tile
@every_activation
@every_size
def test_packed_bias_has_the_order_of_the_maps(width: int, inputs: int, outputs: int, activation: str, maps: int) -> None:
    weights = weights_of(width, inputs, outputs, activation)
    packed = packed_bias(weights, maps)
    sources = [source_of(weights, number) for number in range(len(packed))]
    assert packed.dtype == torch.float32
    assert len(packed) == len(packed_filters(weights, maps)) * maps
    assert packed.tolist() == [0.0 if source is None else float(weights.bias[source]) for source in sources]


@every_activation
def test_value_and_gate_are_eight_maps_apart(activation: str) -> None:
    weights = weights_of(1, 1, 40, activation)
    apart = [
        (source_of(weights, strip + row), source_of(weights, strip + row + 8)) for strip in range(0, 32, 16) for row in range(8)
    ]
    if activation in GATED:
        assert apart == [(output, weights.outputs + output) for output in range(16)]
    else:
        assert apart == [(number, number + 8) for strip in range(0, 32, 16) for number in range(strip, strip + 8)]


@every_tile
def test_packed_filters_give_the_same_sums(maps: int) -> None:
    weights = weights_of(3, 70, 33, "glu")
    steps = torch.randn(5, 3, 70, generator=torch.Generator().manual_seed(1)).half().float()
    packed = packed_filters(weights, maps).float()
    row = torch.arange(maps)[:, None]
    rows = packed[:, :, :, row, torch.arange(8) ^ row % 8].flatten(-2)  # tiles, chunks, taps, maps, 64
    padded = torch.nn.functional.pad(steps, (0, 2 * DEPTH - 70)).view(5, 3, 2, DEPTH)
    sums = torch.einsum("tkcd,nckmd->tnm", padded, rows).reshape(5, -1, 2, STRIP // 2)
    values, gates = (sums[:, :, half].reshape(5, -1)[:, :33] for half in (0, 1))
    expected = torch.einsum("tki,kim->tm", steps, weights.filters.float())
    torch.testing.assert_close(torch.cat([values, gates], dim=1), expected, rtol=1e-4, atol=1e-4)
