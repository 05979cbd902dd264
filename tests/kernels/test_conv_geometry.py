"""The steps that are computed if only the last step is wanted, and the filters as the CUDA kernel reads them."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from kernels.conv.geometry import ALL_STEPS, LAST_STEP, NeededSteps, needed_steps, steps_apart
from kernels.conv.packing import DEPTH, STRIP, packed_bias, packed_filters
from kernels.conv.types import GATED, ConvWeights
from tests.kernels.families import Form


def layer(width: int, dilation: int, part: int = -1) -> ConvWeights:
    """Return a layer that keeps the steps, with `part` steps on the left, or all of them for a causal layer."""
    around = (width - 1) * dilation
    left = around if part < 0 else part % (around + 1)
    return ConvWeights(torch.zeros(width, 1, 1), torch.zeros(1), left, around - left, dilation)


some_dilations = st.sampled_from([1, 2, 3, 4, 6, 8])
some_layers = st.builds(layer, st.integers(1, 4), some_dilations, st.just(-1) | st.integers(0, 99))


def dependencies(layers: Sequence[ConvWeights], steps: int) -> list[set[int]]:
    """Return the output steps of each layer that the last step of the last layer depends on."""
    found = [{steps - 1}]
    for conv in reversed(layers[1:]):
        taps = range(len(conv.filters))
        read = {last - conv.left + tap * conv.dilation for last in found[-1] for tap in taps}
        found.append({step for step in read if 0 <= step < steps})
    return found[::-1]


def computed_steps(kept: NeededSteps, steps: int) -> list[int]:
    """Return the steps of a row that are computed, in order."""
    if not kept.count:
        return list(range(steps))
    return [
        step for step in range(steps) if (back := steps - 1 - step) % kept.spacing == 0 and back // kept.spacing < kept.count
    ]


@hypothesis.given(st.lists(some_layers, min_size=1, max_size=5), st.integers(1, 60))
@hypothesis.settings(max_examples=80)
def test_needed_steps_include_every_dependency(layers: list[ConvWeights], steps: int) -> None:
    """The kernel counts windows and taps in units of the spacing of the input steps."""
    needed = needed_steps(layers)
    assert len(needed) == len(layers) and needed[-1] == LAST_STEP
    assert all(
        wanted <= {*computed_steps(kept, steps)} for wanted, kept in zip(dependencies(layers, steps), needed, strict=True)
    )
    for conv, inner, outer in zip(layers, [ALL_STEPS, *needed], needed, strict=False):
        inputs, outputs = computed_steps(inner, steps), computed_steps(outer, steps)
        stride = steps_apart(inner, outer)
        origin = len(inputs) - 1 - (len(outputs) - 1) * stride - conv.left // inner.spacing
        for window, step in enumerate(outputs):
            for tap in range(len(conv.filters)):
                at, wanted = origin + window * stride + tap * (conv.dilation // inner.spacing), step - conv.left
                wanted += tap * conv.dilation
                found = inputs[at] if 0 <= at < len(inputs) else None
                assert found == (wanted if 0 <= wanted < steps else None)


@hypothesis.given(st.lists(st.builds(layer, st.integers(1, 4), some_dilations), min_size=1, max_size=5))
@hypothesis.settings(max_examples=40)
def test_needed_steps_of_causal_layers_are_minimal(layers: list[ConvWeights]) -> None:
    """In a row that is as long as the receptive field."""
    steps = 1 + sum(conv.left for conv in layers)
    for wanted, kept in zip(dependencies(layers, steps), needed_steps(layers), strict=True):
        assert computed_steps(kept, steps)[0] == min(wanted)
        assert kept.spacing == (gcd(*(steps - 1 - step for step in wanted)) if kept.count > 1 else kept.spacing)


def test_tcn_needs_few_steps() -> None:
    counts = [
        (kept.count, kept.spacing) for kept in needed_steps([layer(3, dilation) for dilation in (1, 1, 2, 2, 4, 4, 8, 8)])
    ]
    assert counts == [(59, 1), (29, 2), (27, 2), (13, 4), (11, 4), (5, 8), (3, 8), (1, 1)]


# Packed filters.


@pytest.mark.parametrize("maps", [64, 128])
@pytest.mark.parametrize("activation", ["relu", "glu"])
@pytest.mark.parametrize("width, inputs, outputs", [(1, 1, 1), (2, 65, 33), (3, 130, 70)])
def test_packed_filters_give_the_same_sums(width: int, inputs: int, outputs: int, activation: str, maps: int) -> None:
    """Rows of 64 inputs are swizzled in pieces of 8. In a strip of 16 maps, value and gate are eight maps apart."""
    form = Form("conv", width=width, activation=activation)
    weights: ConvWeights = form.arguments([], outputs, inputs, storage=torch.float16).weights
    packed, bias, row = packed_filters(weights, maps), packed_bias(weights, maps), torch.arange(maps)[:, None]
    assert packed.is_contiguous() and bias.dtype == torch.float32 and len(bias) == len(packed) * maps
    rows = packed.float()[:, :, :, row, torch.arange(8) ^ row % 8].flatten(-2)  # tiles, chunks, taps, maps, 64
    steps = torch.randn(5, width, inputs, generator=torch.Generator().manual_seed(1)).half().float()
    padded = torch.nn.functional.pad(steps, (0, -inputs % DEPTH)).view(5, width, -1, DEPTH)
    sums = torch.einsum("tkcd,nckmd->tnm", padded, rows).reshape(5, -1) + bias
    if activation in GATED:
        strips = sums.view(5, -1, 2, STRIP // 2)
        sums = torch.cat([strips[:, :, half].reshape(5, -1)[:, :outputs] for half in (0, 1)], dim=1)
    expected = torch.einsum("tki,kim->tm", steps, weights.filters.float()) + weights.bias.float()
    torch.testing.assert_close(sums[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-4)
