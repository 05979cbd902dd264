"""Which steps are computed where only the last one is wanted: those that it depends on, and hardly more."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import hypothesis
import torch
from hypothesis import strategies as st

from kernels.contract import ConvWeights
from kernels.conv.rows import apart
from kernels.conv.thinning import ALL, LAST, Thinned, thinned

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


def seen(above: set[int], one: ConvWeights, steps: int) -> set[int]:
    """Steps of a row of so many that a layer sees for those of its own output."""
    taps = range(len(one.filters))
    return {step for last in above for tap in taps if 0 <= (step := last - one.left + tap * one.dilation) < steps}


def needed(layers: Sequence[ConvWeights], steps: int) -> list[set[int]]:
    """Steps of what each layer gives that the last step of the last one depends on."""
    found = [{steps - 1}]
    for one in reversed(layers[1:]):
        found.append(seen(found[-1], one, steps))
    return found[::-1]


def there(kept: Thinned, steps: int) -> list[int]:
    """Those of a row of so many, in their order."""
    if not kept.most:
        return list(range(steps))
    return [step for step in range(steps) if (back := steps - 1 - step) % kept.every == 0 and back // kept.every < kept.most]


@hypothesis.given(st.lists(some_causal | some_centred, min_size=1, max_size=5), some_steps)
@hypothesis.settings(max_examples=400, deadline=None)
def test_every_step_is_there_that_the_last_one_depends_on(layers: list[ConvWeights], steps: int) -> None:
    given = thinned(layers)
    assert len(given) == len(layers)
    assert given[-1] == LAST
    for wanted, kept in zip(needed(layers, steps), given, strict=True):
        assert wanted <= {*there(kept, steps)}


@hypothesis.given(st.lists(some_causal, min_size=1, max_size=5))
@hypothesis.settings(max_examples=200, deadline=None)
def test_of_causal_layers_none_is_there_before_the_first_that_is_needed_or_between_what_their_taps_reach(
    layers: list[ConvWeights],
) -> None:
    """In a row that is long enough."""
    steps = 1 + sum(one.left for one in layers)
    for wanted, kept in zip(needed(layers, steps), thinned(layers), strict=True):
        assert there(kept, steps)[0] == min(wanted)
        assert kept.every == (gcd(*(steps - 1 - step for step in wanted)) if kept.most > 1 else kept.every)


@hypothesis.given(st.lists(some_causal | some_centred, min_size=1, max_size=5), some_steps)
@hypothesis.settings(max_examples=400, deadline=None)
def test_what_a_tap_sees_is_counted_from_the_last_step_there_is(layers: list[ConvWeights], steps: int) -> None:
    """As a kernel finds it: of the windows of a row, in units of what lies between two of its inputs."""
    kept_before = [ALL, *thinned(layers)]
    for one, inner, outer in zip(layers, kept_before, kept_before[1:], strict=False):
        inputs, outputs = there(inner, steps), there(outer, steps)
        stride = apart(inner, outer)
        origin = len(inputs) - 1 - (len(outputs) - 1) * stride - one.left // inner.every
        for window, step in enumerate(outputs):
            for tap in range(len(one.filters)):
                at, wanted = (
                    origin + window * stride + tap * (one.dilation // inner.every),
                    step - one.left + tap * one.dilation,
                )
                found = inputs[at] if 0 <= at < len(inputs) else None
                assert found == (wanted if 0 <= wanted < steps else None)


def test_a_temporal_convolutional_network_needs_few_of_many_steps() -> None:
    layers = [layer(3, 2 * dilation, 0, dilation) for dilation in (1, 1, 2, 2, 4, 4, 8, 8)]
    counts = [(kept.most, kept.every) for kept in thinned(layers)]
    assert counts == [(59, 1), (29, 2), (27, 2), (13, 4), (11, 4), (5, 8), (3, 8), (1, 1)]
