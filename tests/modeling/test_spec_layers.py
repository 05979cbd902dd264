"""The keys and tensors of each kind of layer and head, and which combinations are valid."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from service.modeling.spec import ModelSpec

IDS = {"kind": "ids", "vocabulary": 13, "max_steps": 64}
FEATURES = {"kind": "features", "features": 7, "max_steps": 64}
EMBEDDING = {"kind": "embedding", "width": 6}
LSTM = {"kind": "lstm", "hidden": 5}
CONV = {"kind": "conv", "filters": 4, "width": 3}
TEXT_CNN = {"kind": "text_cnn", "widths": [3, 1], "filters": 4}
LABELS = ["near", "far", "unknown"]
CLASSIFY = {"kind": "classify", "pool": "max", "labels": LABELS}
SEQUENCE = {"kind": "sequence"}
Table = dict[str, Any]


def model(*layers: Table, head: Table = CLASSIFY, input: Table = FEATURES) -> ModelSpec:
    return ModelSpec.model_validate(
        {"name": "made-up", "precision": "float32", "input": input, "layers": layers or (LSTM,), "head": head}
    )


def error_messages(*layers: Table, head: Table = CLASSIFY, input: Table = FEATURES) -> list[str]:
    """Return each error as `key: message`."""
    with pytest.raises(ValidationError) as caught:
        model(*layers, head=head, input=input)
    return [f"{error['loc'][-1] if error['loc'] else 'whole'}: {error['msg']}" for error in caught.value.errors()]


@pytest.mark.parametrize(
    "head, weight",
    [
        (CLASSIFY, (5, 3)),
        ({"kind": "regress", "pool": "mean", "outputs": 4}, (5, 4)),
        ({"kind": "tag", "labels": LABELS}, (5, 3)),
        ({"kind": "span"}, (5, 2)),
        ({"kind": "next"}, (5, 13)),
        ({"kind": "embed", "pool": "mean"}, None),
        ({"kind": "sequence"}, None),
    ],
    ids=str,
)
def test_tensors_of_a_head(head: Table, weight: tuple[int, int] | None) -> None:
    made = model(EMBEDDING, LSTM, head=head, input=IDS).tensors()
    held = {name: shape for name, shape in made.items() if name.startswith("head.")}
    assert held == ({"head.weight": weight, "head.bias": weight[1:]} if weight else {})


CONV_KEYS = {"filters": 4, "width": 3}
WRONG: list[tuple[str, Table, str, Any]] = [
    *(
        ("lstm", {"hidden": 5}, key, value)
        for key, value in (("hidden", None), ("hidden", 0), ("depth", 5.0), ("reset_after", True))
    ),
    *(
        ("lstm", {"hidden": 5}, "bidirectional", 1),
        ("gru", {"hidden": 5}, "reset_after", "no"),
        ("gru", {"hidden": 5}, "window", 2),
    ),
    *(("sru", {"hidden": 5}, "scale", value) for value in (float("inf"), float("nan"), "a")),
    *(("sru", {"hidden": 5}, key, value) for key, value in (("activation", "relu"), ("projection", 0), ("layer_norm", True))),
    *(("qrnn", {"hidden": 5}, key, value) for key, value in (("window", 0), ("pooling", "if"))),
    *(
        ("conv", CONV_KEYS, key, value)
        for key, value in (("width", None), ("stride", 0), ("dilation", -1), ("padding", "valid"))
    ),
    *(("tcn", {"filters": 4, "levels": 2}, key, value) for key, value in (("levels", 17), ("width", 0), ("dilation", 2))),
    *(
        ("text_cnn", {"widths": [3], "filters": 4}, key, value)
        for key, value in (("widths", []), ("padding", -1), ("stride", 2))
    ),
]


@pytest.mark.parametrize("kind, keys, key, value", WRONG)
def test_invalid_layer_error_names_the_key(kind: str, keys: Table, key: str, value: Any) -> None:
    """None stands for a key that is missing, where it is required."""
    table = {name: given for name, given in {"kind": kind, **keys, key: value}.items() if given is not None}
    assert any(one.startswith(f"{key}: ") for one in error_messages(table))


@pytest.mark.parametrize(
    "layer, head, message",
    [
        ({"kind": "text_cnn", "widths": [3, 2, 3], "filters": 4}, CLASSIFY, "widths must be unique: raise filters instead"),
        ({**CONV, "activation": "swish"}, CLASSIFY, "'exponential', 'glu' or 'gated_tanh'"),
        ({"kind": "lstm", "hidden": 4, "merge": "sum"}, SEQUENCE, "combines two directions: set bidirectional"),
        ({"kind": "lstm", "hidden": 4, "bidirectional": True, "direction": "backward"}, SEQUENCE, "runs in both directions"),
        ({"kind": "gru", "hidden": 4, "layer_norm": True, "reset_after": False}, SEQUENCE, "set reset_after"),
        ({**CONV, "groups": 2}, SEQUENCE, "groups is 2 and must divide the 7 inputs"),
        ({**CONV, "pads": (1, 0), "padding": "causal"}, SEQUENCE, "remove one of them"),
        ({"kind": "lstm", "hidden": 4, "activation": {"kind": "tanh", "alpha": 2.0}}, SEQUENCE, "tanh has no parameter alpha"),
        ({"kind": "lstm", "hidden": 4, "activation": 3}, SEQUENCE, "write the name of an activation"),
        (LSTM, {"kind": "tag", "labels": ["near"]}, "labels has one label, and softmax would always choose it"),
        (LSTM, {"kind": "tag", "labels": ["near", "near"]}, "labels must be unique"),
        (LSTM, {"kind": "tag", "labels": LABELS, "pool": "max"}, "pool: Extra inputs are not permitted"),
        (LSTM, {"kind": "regress"}, "pool: Field required"),
        (LSTM, {"kind": "regress", "pool": "max", "outputs": 0}, "outputs: Input should be greater than 0"),
        (LSTM, {"kind": "next", "top": 0}, "top: Input should be greater than 0"),
        (LSTM, {"kind": "embed", "pool": "mean", "normalize": 1}, "normalize: Input should be a valid boolean"),
    ],
    ids=str,
)
def test_tables_that_mean_nothing_are_refused(layer: Table, head: Table, message: str) -> None:
    assert any(message in one for one in error_messages(layer, head=head))


def model_error(*layers: Table, head: Table = CLASSIFY, input: Table = FEATURES) -> str:
    """Return the error of tables that are valid on their own."""
    [message] = error_messages(*layers, head=head, input=input)
    return message.removeprefix("whole: Value error, ")


def test_text_cnn_must_be_the_last_layer() -> None:
    assert model_error(TEXT_CNN, LSTM) == "a text_cnn outputs one vector per sequence: it can only be the last layer"


def test_text_cnn_rejects_heads_that_need_steps() -> None:
    message = 'a text_cnn needs a head of kind classify, regress or embed with pool = "max"'
    for head in ({"kind": "embed", "pool": "mean"}, {"kind": "span"}, {"kind": "sequence"}):
        assert model_error(EMBEDDING, TEXT_CNN, head=head, input=IDS) == message


def test_next_head_needs_a_vocabulary() -> None:
    head = {"kind": "next", "top": 13}
    assert model_error(LSTM, head=head) == 'a head of kind "next" needs an input of kind "text" or "ids"'
    assert model(EMBEDDING, LSTM, head=head, input=IDS).has_embedding
    message = "head.top is 14 and input.vocabulary is 13: lower head.top"
    assert model_error(EMBEDDING, LSTM, head={"kind": "next", "top": 14}, input=IDS) == message


def test_max_steps_below_min_steps_is_rejected() -> None:
    wide = {"kind": "conv", "filters": 4, "width": 9, "padding": "none", "dilation": 2}
    assert model(wide, input={**FEATURES, "max_steps": 17}).min_steps == 17
    message = "the layers need 17 steps and input.max_steps is 16: raise it"
    assert model_error(wide, input={**FEATURES, "max_steps": 16}) == message
