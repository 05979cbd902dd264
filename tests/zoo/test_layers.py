"""Depth, directions and the embedding in front, composed around one kernel, beside torch.nn.LSTM."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from kernels.contract import LSTMState, Ragged
from service.zoo.layers import Embedded, Folded, LSTMStack
from service.zoo.spec import LSTMLayer
from tests.kernels import inputs
from tests.kernels.inputs import EVERYTHING, assert_close, assert_encodes_alike
from tests.zoo import peers

CPU = torch.device("cpu")
LENGTHS = [9, 1, 14, 3]
every_stack = pytest.mark.parametrize("depth, bidirectional", [(1, False), (1, True), (2, False), (2, True), (3, True)])


class Stacked(NamedTuple):
    """One of ours and the peer that has its weights."""

    stack: LSTMStack
    peer: nn.LSTM


def stacked(depth: int, bidirectional: bool, width: int = peers.FEATURES) -> Stacked:
    torch.manual_seed(0)
    peer = nn.LSTM(width, peers.HIDDEN, depth, bidirectional=bidirectional).requires_grad_(False)
    layer = LSTMLayer(kind="lstm", hidden=peers.HIDDEN, depth=depth, bidirectional=bidirectional)
    return Stacked(LSTMStack(layer, peers.stack_arrays(peer), CPU), peer)


def features(lengths: list[int], seed: int = 0) -> Ragged:
    return inputs.ragged(peers.made_up_rows(lengths, embedded=False, seed=seed), lengths)


@every_stack
def test_a_stack_is_torch_nn_lstm_on_each_row(depth: int, bidirectional: bool) -> None:
    stack, peer = stacked(depth, bidirectional)
    x = features(LENGTHS)
    encoded, states = stack(x, EVERYTHING)
    assert encoded.steps is not None and encoded.last is not None and encoded.mean is not None and encoded.max is not None
    ours = inputs.rows(Ragged(encoded.steps, x.offsets))
    for row, data in enumerate(inputs.rows(x)):
        steps, (hidden, cell) = peer(data)
        assert_close(ours[row], steps, steps=len(data))
        assert_close(encoded.last[row], torch.cat(list(hidden[-1 - bidirectional :])), steps=len(data))
        assert_close(encoded.mean[row], steps.mean(0), steps=len(data))
        assert_close(encoded.max[row], steps.amax(0), steps=len(data))
        assert_close(torch.stack([state.hidden[row] for state in states]), hidden, steps=len(data))
        assert_close(torch.stack([state.cell[row] for state in states]), cell, steps=len(data))


@every_stack
def test_a_stack_starts_from_the_states_it_is_given_level_by_level_forward_first(depth: int, bidirectional: bool) -> None:
    stack, peer = stacked(depth, bidirectional)
    x = features([6])
    initial = torch.randn(2, depth * (1 + bidirectional), 1, peers.HIDDEN)
    encoded, _ = stack(x, EVERYTHING, states=[LSTMState(*one) for one in zip(*initial, strict=True)])
    steps, _ = peer(x.data, (initial[0, :, 0], initial[1, :, 0]))
    assert encoded.steps is not None
    assert_close(encoded.steps, steps, steps=6)


@pytest.mark.parametrize("cuts", [[0, 7, 14], [0, 1, 2, 3, 14], [0, 0, 13, 14]], ids=str)
def test_a_unidirectional_stack_over_chunks_that_carry_the_states_gives_the_whole(cuts: list[int]) -> None:
    stack, _ = stacked(2, bidirectional=False)
    x = features(LENGTHS)
    whole, after_whole = stack(x, EVERYTHING)
    states: list[LSTMState] | None = None
    written: list[list[Tensor]] = [[] for _ in LENGTHS]
    for begin, end in pairwise(cuts):
        pieces = [row[begin:end] for row in inputs.rows(x)]
        chunk = inputs.ragged(torch.cat(pieces), [len(piece) for piece in pieces])
        encoded, states = stack(chunk, EVERYTHING, states=states)
        assert encoded.steps is not None
        for row, steps in zip(written, inputs.rows(Ragged(encoded.steps, chunk.offsets)), strict=True):
            row.append(steps)
    assert whole.steps is not None and whole.last is not None and encoded.last is not None and states is not None
    assert_close(torch.cat([steps for row in written for steps in row]), whole.steps, steps=max(LENGTHS))
    assert_close(encoded.last, whole.last, steps=max(LENGTHS))
    for carried, expected in zip(states, after_whole, strict=True):
        assert_close(carried.hidden, expected.hidden, steps=max(LENGTHS))
        assert_close(carried.cell, expected.cell, steps=max(LENGTHS))


@every_stack
def test_a_folded_and_a_plain_embedding_encode_alike(depth: int, bidirectional: bool) -> None:
    stack, _ = stacked(depth, bidirectional, peers.WIDTH)
    table = torch.randn(peers.VOCABULARY, peers.WIDTH)
    x = inputs.ragged(peers.made_up_rows(LENGTHS, embedded=True), LENGTHS)
    folded, _ = stack(x, EVERYTHING, Folded(table, stack.levels[0]))
    embedded, _ = stack(x, EVERYTHING, Embedded(table))
    assert_encodes_alike(folded, embedded, steps=max(LENGTHS))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_bytes_of_folded_tables_are_known_before_they_are_made(bidirectional: bool) -> None:
    stack, _ = stacked(2, bidirectional, peers.WIDTH)
    table = torch.randn(peers.VOCABULARY, peers.WIDTH).half()
    made = Folded(table, stack.levels[0]).tensors()
    assert Folded.bytes(table, stack.levels[0]) == sum(one.numel() * one.element_size() for one in made)


@every_stack
def test_a_stack_says_which_backend_runs_it_and_what_it_holds(depth: int, bidirectional: bool) -> None:
    stack, peer = stacked(depth, bidirectional)
    assert stack.backend() == "framework"
    biases = 4 * peers.HIDDEN * depth * (1 + bidirectional)
    assert sum(one.numel() for one in stack.tensors()) == sum(one.numel() for one in peer.parameters()) - biases
