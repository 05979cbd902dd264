"""The steps that are computed if only the last step is wanted: its dependencies, and few others."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import hypothesis
import torch
from hypothesis import strategies as st

from kernels.conv.geometry import ALL_STEPS, LAST_STEP, NeededSteps, needed_steps, steps_apart
from kernels.conv.types import ConvWeights

some_dilations = st.sampled_from([1, 2, 3, 4, 6, 8])
some_causal = st.builds(
    lambda width, dilation: layer(width, (width - 1) * dilation, 0, dilation), st.integers(1, 4), some_dilations
)
some_centred = st.builds(
    lambda width, dilation, part: layer(
        width, left := part % ((width - 1) * dilation + 1), (width - 1) * dilation - left, dilation
    ),
    st.integers(1, 4),
    some_dilations,
    st.integers(0, 99),
)
some_steps = st.integers(1, 60)


def layer(width: int, left: int, right: int, dilation: int = 1) -> ConvWeights:
    return ConvWeights(torch.zeros(width, 1, 1), torch.zeros(1), left, right, dilation)


def steps_read(above: set[int], conv: ConvWeights, steps: int) -> set[int]:
    """Return the input steps that a layer reads for these output steps of a row."""
    taps = range(len(conv.filters))
    return {step for last in above for tap in taps if 0 <= (step := last - conv.left + tap * conv.dilation) < steps}


def dependencies(layers: Sequence[ConvWeights], steps: int) -> list[set[int]]:
    """Return the output steps of each layer that the last step of the last layer depends on."""
    steps_of_layers = [{steps - 1}]
    for conv in reversed(layers[1:]):
        steps_of_layers.append(steps_read(steps_of_layers[-1], conv, steps))
    return steps_of_layers[::-1]


def computed_steps(kept: NeededSteps, steps: int) -> list[int]:
    """Return the steps of a row that are computed, in order."""
    if not kept.count:
        return list(range(steps))
    return [
        step for step in range(steps) if (back := steps - 1 - step) % kept.spacing == 0 and back // kept.spacing < kept.count
    ]


@hypothesis.given(st.lists(some_causal | some_centred, min_size=1, max_size=5), some_steps)
@hypothesis.settings(max_examples=400)
def test_needed_steps_include_every_dependency(layers: list[ConvWeights], steps: int) -> None:
    given = needed_steps(layers)
    assert len(given) == len(layers)
    assert given[-1] == LAST_STEP
    for wanted, kept in zip(dependencies(layers, steps), given, strict=True):
        assert wanted <= {*computed_steps(kept, steps)}


@hypothesis.given(st.lists(some_causal, min_size=1, max_size=5))
@hypothesis.settings(max_examples=200)
def test_needed_steps_of_causal_layers_are_minimal(
    layers: list[ConvWeights],
) -> None:
    """In a row that is as long as the receptive field."""
    steps = 1 + sum(conv.left for conv in layers)
    for wanted, kept in zip(dependencies(layers, steps), needed_steps(layers), strict=True):
        assert computed_steps(kept, steps)[0] == min(wanted)
        assert kept.spacing == (gcd(*(steps - 1 - step for step in wanted)) if kept.count > 1 else kept.spacing)


@hypothesis.given(st.lists(some_causal | some_centred, min_size=1, max_size=5), some_steps)
@hypothesis.settings(max_examples=400)
def test_kernel_arithmetic_finds_the_step_of_each_tap(layers: list[ConvWeights], steps: int) -> None:
    """The kernel counts windows and taps in units of the spacing of the input steps."""
    kept_before = [ALL_STEPS, *needed_steps(layers)]
    for conv, inner, outer in zip(layers, kept_before, kept_before[1:], strict=False):
        inputs, outputs = computed_steps(inner, steps), computed_steps(outer, steps)
        stride = steps_apart(inner, outer)
        origin = len(inputs) - 1 - (len(outputs) - 1) * stride - conv.left // inner.spacing
        for window, step in enumerate(outputs):
            for tap in range(len(conv.filters)):
                at, wanted = (
                    origin + window * stride + tap * (conv.dilation // inner.spacing),
                    step - conv.left + tap * conv.dilation,
                )
                found = inputs[at] if 0 <= at < len(inputs) else None
                assert found == (wanted if 0 <= wanted < steps else None)


def test_tcn_needs_few_steps() -> None:
    layers = [layer(3, 2 * dilation, 0, dilation) for dilation in (1, 1, 2, 2, 4, 4, 8, 8)]
    counts = [(kept.count, kept.spacing) for kept in needed_steps(layers)]
    assert counts == [(59, 1), (29, 2), (27, 2), (13, 4), (11, 4), (5, 8), (3, 8), (1, 1)]
