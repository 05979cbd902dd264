"""A whole model: what it gives is what the same model gives in plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from kernels.contract import Ragged
from service.zoo.encoder import Encoder
from service.zoo.layers import Embedded, Folded
from tests.kernels import inputs
from tests.kernels.inputs import assert_close
from tests.zoo import peers
from tests.zoo.peers import Peer, peer

CPU = torch.device("cpu")
LENGTHS = [9, 1, 14, 3]
AMPLE = 1 << 20


def encoder(model: Peer, fold_limit_bytes: int = AMPLE) -> Encoder:
    return Encoder(model.spec(), model.arrays(), CPU, fold_limit_bytes)


def batch(model: Peer) -> Ragged:
    return inputs.ragged(peers.made_up_rows(LENGTHS, embedded=model.embedding is not None), LENGTHS)


def assert_is(model: Peer, encoder: Encoder) -> None:
    """Scores, embedding and steps of every row are the plain computation's."""
    x = batch(model)
    encoding = encoder(x, sequence=True)
    assert encoding.sequence is not None
    ours = inputs.rows(Ragged(encoding.sequence, x.offsets))
    with torch.inference_mode():
        for row, data in enumerate(inputs.rows(x)):
            scores, pooled, steps = model(data)
            assert_close(encoding.scores[row], scores, steps=len(data))
            assert_close(encoding.embedding[row], pooled, steps=len(data))
            assert_close(ours[row], steps, steps=len(data))


@pytest.mark.parametrize("pool", ["last", "mean", "max"])
@pytest.mark.parametrize("depth, bidirectional", [(1, False), (2, True)])
@pytest.mark.parametrize("embedded", [False, True])
def test_a_model_gives_what_plain_torch_gives(embedded: bool, depth: int, bidirectional: bool, pool: str) -> None:
    model = peer(embedded=embedded, depth=depth, bidirectional=bidirectional, pool=pool)
    assert_is(model, encoder(model))


@pytest.mark.parametrize("pool", ["last", "mean", "max"])
def test_scores_are_probabilities(pool: str) -> None:
    model = peer(pool=pool)
    scores = encoder(model)(batch(model)).scores
    assert scores.dtype == torch.float32
    assert bool((scores > 0).all())
    assert_close(scores.sum(1), torch.ones(len(LENGTHS)), steps=0)


def test_the_steps_are_given_only_when_asked_for() -> None:
    model = peer(pool="last")
    assert encoder(model)(batch(model)).sequence is None


FirstInputs = type[Embedded] | type[Folded]


def measured_faster(monkeypatch: pytest.MonkeyPatch, faster: FirstInputs) -> None:
    """Every trial with this first input takes a second, every other one two."""

    def trial(tried: Encoder, rows: int, steps: int) -> float:
        return 1.0 if tried.backends()["layers.0"] == faster.name else 2.0

    monkeypatch.setattr(Encoder, "trial", trial)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("faster", [Embedded, Folded])
def test_the_faster_first_input_is_taken_and_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, faster: FirstInputs, bidirectional: bool
) -> None:
    measured_faster(monkeypatch, faster)
    model = peer(bidirectional=bidirectional)
    made = encoder(model)
    assert made.backends() == {"layers.0": faster.name, "layers.1": "framework"}
    assert_is(model, made)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_table_over_the_limit_is_not_folded(monkeypatch: pytest.MonkeyPatch, bidirectional: bool) -> None:
    measured_faster(monkeypatch, Folded)
    model = peer(bidirectional=bidirectional)
    table_bytes = peers.VOCABULARY * 4 * peers.HIDDEN * 4 * (1 + bidirectional)
    taken = {limit: encoder(model, limit).backends()["layers.0"] for limit in (0, table_bytes - 1, table_bytes)}
    assert taken == {0: Embedded.name, table_bytes - 1: Embedded.name, table_bytes: Folded.name}


def test_a_model_over_features_has_no_first_input() -> None:
    assert encoder(peer(embedded=False, depth=2)).backends() == {"layers.0": "framework"}


def test_the_weight_bytes_are_those_of_all_parameters() -> None:
    model = peer(depth=2, bidirectional=True)
    second_biases = 4 * peers.HIDDEN * 4
    parameters = sum(one.numel() for one in model.parameters()) - second_biases
    assert encoder(model, fold_limit_bytes=0).weight_bytes() == 4 * parameters


def test_a_trial_takes_time_and_leaves_nothing_behind() -> None:
    model = peer(embedded=False)
    made = encoder(model)
    before = made(batch(model))
    assert made.trial(rows=3, steps=5) > 0
    assert torch.equal(made(batch(model)).scores, before.scores)
