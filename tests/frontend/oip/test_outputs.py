"""The engine's arrays become the output tensors that a request names, in the layout of its sequences."""

from __future__ import annotations

from typing import Any

import pytest

from service.errors import InvalidInput, TooLarge
from service.frontend.oip.tensors import BYTES, Tensor
from service.frontend.oip.types import RequestedOutput
from tests.frontend.oip.harness import ANSWERS, OFFSETS, TWO_IDS, InferHarness, integers, three_sequences, values

PACKED = [integers("ids", [1] * 6), integers("offsets", OFFSETS)]
EXPECTED: dict[str, dict[str, Any]] = {
    "words": {
        "label": [b"far", b"near", b"unknown"],
        "score": [[0.5], [0.5], [0.75]],
        "scores": ANSWERS["words"]["scores"],
    },
    "forecaster": {"value": ANSWERS["forecaster"]["scores"]},
    "reader": {"start": [[0], [0], [1]], "end": [[1], [0], [2]], "score": [[0.5], [0.25], [0.75]]},
    "embedder": {"embedding": ANSWERS["embedder"]["embedding"]},
    "tagger": {  # padded, like the inputs
        "labels": [*(b"near", b"far", b""), *(b"unknown", b"", b""), *(b"near", b"far", b"unknown")],
        "scores": [[0.5, 0.25, 0], [0.75, 0, 0], [1.0, 0.5, 0.5]],
        "lengths": [[2], [1], [3]],
    },
}


def test_each_head_has_its_own_outputs(harness: InferHarness) -> None:
    """Classes are sorted best first."""
    for name, expected in EXPECTED.items():
        response = harness.infer(name, *three_sequences(name))
        assert (response.model, response.version, response.id, response.parameters) == (name, "1", "7", {})
        assert list(values(response)) == list(expected) and values(response) == expected
    assert harness.dispatcher.requests[0][0].returns.embedding is False
    assert values(harness.infer("speller", *three_sequences("speller")))["ids"] == ANSWERS["speller"]["picks"]
    halved = harness.infer("halver", *three_sequences("halver"))
    assert [output.shape for output in halved.outputs] == [(3, 3, 5), (3, 1)], "an encoder may shorten its input"
    [two] = harness.infer("words", *three_sequences("words"), outputs=[RequestedOutput("scores", 2)]).outputs
    assert (two.datatype, two.shape) == (BYTES, (3, 2))
    assert two.values == [b"0.5:1:far", b"0.25:0:near", b"0.5:0:near", b"0.25:1:far", b"0.75:2:unknown", b"0.125:0:near"]
    [all_classes] = harness.infer("words", *three_sequences("words"), outputs=[RequestedOutput("scores", 2**40)]).outputs
    assert all_classes.shape == (3, 3)


def test_step_outputs_of_packed_sequences_are_packed(harness: InferHarness) -> None:
    tagged = harness.infer("tagger", *PACKED)
    assert values(tagged)["labels"] == [b"near", b"far", b"unknown", b"near", b"far", b"unknown"]
    shapes = {output.name: output.shape for output in tagged.outputs}
    assert shapes == {"labels": (1, 6), "scores": (1, 6), "offsets": (1, 4)}
    assert values(tagged)["offsets"] == [OFFSETS]


@pytest.mark.parametrize("inputs", [three_sequences("tagger"), PACKED], ids=["padded", "packed"])
def test_outputs_have_the_requested_order(harness: InferHarness, inputs: list[Tensor]) -> None:
    """lengths and offsets may be requested together."""
    requested = [RequestedOutput(name) for name in ("offsets", "labels", "lengths")]
    tagged = values(harness.infer("tagger", *inputs, outputs=requested))
    assert list(tagged) == ["offsets", "labels", "lengths"]
    assert (tagged["lengths"], tagged["offsets"]) == ([[2], [1], [3]], [OFFSETS])


@pytest.mark.parametrize(
    ("model", "outputs", "text"),
    [
        ("words", [RequestedOutput("logits")], "its outputs are label, score, scores, embedding, sequence, lengths"),
        ("words", [RequestedOutput("score"), RequestedOutput("score")], "requested twice"),
        ("words", [RequestedOutput("label", 2)], "has no classes"),
        ("speller", [RequestedOutput("scores", 2)], "has no classes"),
        ("embedder", [RequestedOutput("sequence")], "its outputs are embedding"),
        ("words", [RequestedOutput("lengths")], "describe sequence"),
        ("words", [RequestedOutput("offsets")], "describe sequence"),
    ],
)
def test_invalid_outputs_are_rejected(harness: InferHarness, model: str, outputs: list[RequestedOutput], text: str) -> None:
    harness.check_refused(InvalidInput, "outputs", text, model, *three_sequences(model), outputs=outputs)


def test_padding_of_outputs_is_limited(harness: InferHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.frontend.oip.outputs.MAX_PADDED_BYTES", 35)
    with pytest.raises(TooLarge, match="would have 36 bytes, but at most 35 are allowed"):
        harness.infer("tagger", *three_sequences("tagger"))
    assert harness.infer("tagger", *PACKED).outputs


def test_response_of_a_session_has_its_steps(harness: InferHarness) -> None:
    harness.dispatcher.steps = 12
    assert harness.infer("speller", TWO_IDS, sequence_id=7).parameters == {"sequence_steps": 12}
