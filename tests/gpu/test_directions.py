"""Tests of both directions of LSTMs and GRUs in one launch: each direction computes the same as alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.directions import compose_directions
from kernels.ragged import Encoded, Outputs, Ragged
from tests.gpu.inputs import TOLERANCE, agree, gates, made, outputs, same
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, OUTPUTS, arrays, as_float64, put_in_slots, with_shared_slots

pytestmark = pytest.mark.usefixtures("poisoned")

FORMS = [
    Form("lstm"),
    Form("lstm", peepholes=True),
    Form("gru", reset="after"),
    Form("lstm", ids=True),
    Form("gru", reset="after", ids=True),
]
RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
SIZES = [("cluster", 33), ("cluster", 256), ("cluster", 512), ("grid", 33), ("grid", 256), ("grid", 513), ("grid", 2048)]
MANY = [random.Random(0).randint(0, 9) for _ in range(700)]

every_form = pytest.mark.parametrize("form", FORMS, ids=str)
without_ids = pytest.mark.parametrize("form", [form for form in FORMS if not form.takes_ids], ids=str)
every_size = pytest.mark.parametrize("backend, hidden", SIZES)
both_kernels = pytest.mark.parametrize("backend", ["cluster", "grid"])


def pair_of(form: Form, lengths: Sequence[int], hidden: int, *, as_gates: bool = False) -> tuple[Ragged, Any, Any]:
    """Return data, and weights and states of both directions."""
    make = gates if as_gates else made
    forward, backward = (make(form, lengths, hidden, seed=seed) for seed in (0, 1))
    return forward.x, (forward.weights, backward.weights), (forward.state, backward.state)


def alone(form: Form, backend: str, x: Ragged, weights: Any, states: Any, want: Outputs = EVERYTHING) -> Encoded:
    """Return the joined outputs of both directions, computed in separate calls."""

    def run(x: Ragged, weights: Any, state: Any, *, want: Outputs) -> Encoded:
        return form.run(x, weights, state, want=want, backend=backend)

    return compose_directions(run)(x, weights, states, want=want)


@every_form
@every_size
def test_outputs_and_states_match_the_reference(form: Form, backend: str, hidden: int) -> None:
    x, weights, states = pair_of(form, RAGGED, hidden)
    exact = [as_float64(made(form, RAGGED, hidden, seed=seed)) for seed in (0, 1)]
    expected = form.bidirectional(
        exact[0].x, (exact[0].weights, exact[1].weights), (exact[0].state, exact[1].state), backend="reference"
    )
    agree(form.bidirectional(x, weights, states, backend=backend), expected, TOLERANCE[torch.float16])


@without_ids
@every_size
def test_each_direction_has_the_bits_that_it_has_alone(form: Form, backend: str, hidden: int) -> None:
    x, weights, states = pair_of(form, RAGGED, hidden, as_gates=True)
    for before in (states, None):
        encoded = form.bidirectional(x, weights, before, backend=backend)
        same(encoded, alone(form, backend, x, weights, before))


@without_ids
@pytest.mark.parametrize("backend", ["persistent", "cluster", "grid"])
@pytest.mark.parametrize("hidden", [72, 600])
def test_many_rows(form: Form, backend: str, hidden: int) -> None:
    if backend == "cluster" and hidden == 600:
        hidden = 512
    x, weights, states = pair_of(form, MANY, hidden, as_gates=True)
    same(form.bidirectional(x, weights, states, backend=backend), alone(form, backend, x, weights, states))


@both_kernels
@pytest.mark.parametrize("requested", OUTPUTS)
def test_unrequested_outputs_change_nothing(backend: str, requested: str) -> None:
    form = FORMS[0]
    x, weights, states = pair_of(form, RAGGED, 48, as_gates=True)
    everything = form.bidirectional(x, weights, states, backend=backend)
    encoded = form.bidirectional(x, weights, states, want=Outputs(**{requested: True}), backend=backend)
    assert torch.equal(getattr(encoded, requested), getattr(everything, requested))
    assert all(getattr(encoded, name) is None for name in OUTPUTS if name != requested)


@without_ids
@both_kernels
def test_each_direction_has_its_own_slots(form: Form, backend: str) -> None:
    x, weights, states = pair_of(form, [4, 0, 2], 100, as_gates=True)
    expected = form.bidirectional(x, weights, states, backend=backend)
    slots = torch.tensor([3, 0, 4]).cuda(), torch.tensor([5, 1, 2]).cuda()
    caches = tuple(put_in_slots(state, places, places=6) for state, places in zip(states, slots, strict=True))
    encoded = form.bidirectional(x, weights, caches, backend=backend)
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)
    for after, cache, state in zip(encoded.state, caches, expected.state, strict=True):
        assert after is cache
        assert all(torch.equal(getattr(cache.by_row(), name), array) for name, array in arrays(state).items())


@without_ids
@both_kernels
def test_each_direction_starts_from_its_sources(form: Form, backend: str) -> None:
    x, weights, states = pair_of(form, [4, 0, 2, 3, 0, 0], 100, as_gates=True)
    caches = with_shared_slots(states[0]), with_shared_slots(states[1])
    expected = form.bidirectional(x, weights, (caches[0].by_row(), caches[1].by_row()), backend=backend)
    encoded = form.bidirectional(x, weights, caches, backend=backend)
    assert all(torch.equal(getattr(encoded, name), getattr(expected, name)) for name in OUTPUTS)


@every_form
@both_kernels
def test_cuda_graph_serves_other_lengths_and_values(form: Form, backend: str) -> None:
    first, second = (made(form, lengths, 161, seed=seed).x for seed, lengths in enumerate(([5, 9, 0, 30], [20, 0, 18, 6])))
    _, weights, _ = pair_of(form, [1], 161)
    x = Ragged(first.data.clone(), first.offsets.clone())
    form.bidirectional(x, weights, backend=backend)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = outputs(form.bidirectional(x, weights, backend=backend))
    for other in (second, first):
        x.data.copy_(other.data)
        x.offsets.copy_(other.offsets)
        graph.replay()
        expected = form.bidirectional(replace(other), weights, backend=backend)
        assert all(torch.equal(encoded[name], getattr(expected, name)) for name in OUTPUTS)


def test_batch_without_rows_has_outputs_of_both_directions() -> None:
    x, weights, _ = pair_of(FORMS[0], [], 40)
    encoded = FORMS[0].bidirectional(x, weights)
    assert encoded.steps is not None and encoded.steps.shape == (0, 80)
