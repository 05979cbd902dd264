"""Recurrent layers, in one direction and both, and masks."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.importers.keras.builders import (
    FEATURES,
    STEPS,
    UNITS,
    VOCABULARY,
    Case,
    both,
    cell,
    dense,
    functional,
    imports,
    one,
    over_ids,
    refuses,
)

RECURRENT = ("LSTM", "GRU", "SimpleRNN")
GATES = {"LSTM": ["hard_sigmoid"], "GRU": ["softsign"]}
PADDING = {"LSTM": "post", "GRU": "holes", "SimpleRNN": "pre"}
MERGES = {"concat": "LSTM", "sum": "GRU", "mul": "SimpleRNN", "ave": "GRU"}
"""Ways to merge both directions, and the layer with which `make test` checks each."""


def _swapped(kind: str, layers: Any) -> Any:
    """Return a bidirectional layer with a forward layer that reads backward."""
    forward, backward = (getattr(layers, kind)(UNITS, go_backwards=reads_backward, **STEPS) for reads_backward in (True, False))
    return layers.Bidirectional(forward, backward_layer=backward)


def _of_each_kind(kind: str) -> list[Case]:
    is_first, wrapped = kind == "LSTM", partial(_swapped, kind)
    return [
        imports(f"{kind}: last output", cell(kind)),
        imports(f"{kind}: use_bias=False", cell(kind, use_bias=False, **STEPS)),
        imports(f"{kind}: go_backwards", cell(kind, go_backwards=True)),
        imports(f"{kind}: go_backwards, two layers", cell(kind, go_backwards=True, **STEPS), cell(kind), more=not is_first),
        imports(f"{kind}: unroll", cell(kind, unroll=True), steps=5, more=not is_first),
        *(
            imports(f"{kind}: activation {name}", cell(kind, activation=name, **STEPS), more=name != "relu")
            for name in ("relu", "sigmoid", "linear", "hard_tanh", "elu")
        ),
        *(
            imports(f"{kind}: gates of {gates}", cell(kind, recurrent_activation=gates, **STEPS))
            for gates in GATES.get(kind, ())
        ),
        *(
            imports(f"Bidirectional: {kind}, {mode}, {options}", both(kind, mode, **options), more=kind != in_short)
            for mode, in_short in MERGES.items()
            for options in ({}, STEPS)
        ),
        imports(f"Bidirectional: {kind}, use_bias=False", both(kind, use_bias=False), more=not is_first),
        imports(f"Bidirectional: {kind}, forward layer with go_backwards", wrapped, cell(kind), more=not is_first),
        imports(f"Bidirectional: {kind}, two layers", both(kind, **STEPS), both(kind), dense(), more=not is_first),
        imports(f"RNN: {kind}Cell", lambda layers: layers.RNN(getattr(layers, f"{kind}Cell")(UNITS), **STEPS), more=is_first),
        Case(f"{kind}: final hidden state", functional(lambda keras, x: cell(kind, return_state=True)(keras.layers)(x)[1])),
        Case(f"mask_zero: {kind}", over_ids(cell(kind), mask_zero=True), padding=PADDING[kind]),
    ]


def _final_states(keras: Any, x: Any) -> Any:
    """The usual encoder: final hidden states of both directions, joined."""
    _, forward, _, backward, _ = both("LSTM", return_state=True)(keras.layers)(x)
    return keras.layers.Dense(2)(keras.layers.Concatenate()([forward, backward]))


def _with_backward(layers: Any, **options: Any) -> Any:
    return layers.Bidirectional(layers.GRU(UNITS), backward_layer=layers.GRU(UNITS, go_backwards=True, **options))


def _initial_state(keras: Any, x: Any) -> Any:
    return keras.layers.GRU(UNITS)(x, initial_state=keras.layers.GRU(UNITS, return_state=True)(x)[1])


def _explicit_mask(keras: Any, ids: Any) -> Any:
    return keras.layers.LSTM(UNITS)(keras.layers.Embedding(VOCABULARY, FEATURES)(ids), mask=keras.ops.not_equal(ids, 0))


def _masked(keras: Any, ids: Any) -> Any:
    x = keras.layers.Embedding(VOCABULARY, FEATURES, mask_zero=True)(ids)
    x = keras.layers.Bidirectional(keras.layers.GRU(UNITS, return_sequences=True))(x)
    x = keras.layers.TimeDistributed(keras.layers.Dense(3, activation="relu"))(keras.layers.Dropout(0.5)(x))
    return keras.layers.Dense(2, activation="softmax")(keras.layers.LSTM(UNITS)(x))


def _masked_sum(keras: Any, x: Any) -> Any:
    x = keras.layers.Masking()(x)
    forward, backward = keras.layers.GRU(UNITS)(x), keras.layers.GRU(UNITS, go_backwards=True)(x)
    return keras.layers.Dense(1)(keras.layers.Concatenate()([forward, backward]))


MASKS = [
    *(
        Case(f"mask_zero: {name}", over_ids(*layers, mask_zero=True), padding="pre")
        for name, layers in (
            ("return_sequences", (cell("GRU", **STEPS),)),
            ("two bidirectional layers", (both("LSTM", **STEPS), both("GRU"))),
            ("go_backwards", (cell("GRU", go_backwards=True),)),
            ("mean over time", (cell("GRU", **STEPS), one("GlobalAveragePooling1D"))),
            ("tags", (both("LSTM", **STEPS), dense(3, "softmax"))),
        )
    ),
    Case("mask_zero: functional", functional(_masked, ids=True), padding="pre"),
    Case("mask_zero: a convolution", over_ids(one("Conv1D", 4, 3), one("GlobalMaxPooling1D"), mask_zero=True)),
    Case("Masking: separate forward and backward layers", functional(_masked_sum), padding="post"),
    Case("NotEqual: a mask as an argument", functional(_explicit_mask, ids=True), padding="post"),
]
CASES = [
    *(case for kind in RECURRENT for case in _of_each_kind(kind)),
    imports("GRU: reset_after=False", cell("GRU", reset_after=False, **STEPS)),
    imports("GRU: reset_after=False, use_bias=False", cell("GRU", reset_after=False, use_bias=False)),
    Case(
        "LSTM: stateful",
        lambda keras: keras.Sequential([keras.Input((None, 3), batch_size=1), keras.layers.LSTM(2, stateful=True)]),
    ),
    Case(
        "Bidirectional: merge_mode None, joined",
        functional(lambda keras, x: keras.layers.Concatenate()(both("LSTM", None, **STEPS)(keras.layers)(x))),
    ),
    Case("Bidirectional: return_state, final hidden states joined", functional(_final_states)),
    imports("Bidirectional: backward_layer with the same options", _with_backward),
    refuses(
        "Bidirectional: backward_layer with other options", "different options", partial(_with_backward, activation="relu")
    ),
    Case("GRU: initial_state from a layer", functional(_initial_state), "initial states are tensors of the model"),
    Case("LSTM: cell state", functional(lambda keras, x: keras.layers.LSTM(2, return_state=True)(x)[2]), "is a cell state"),
    refuses("LSTM: activation mish", "its activation is 'mish'", cell("LSTM", activation="mish")),
    refuses("RNN: several cells", "its cell is 'StackedRNNCells'", lambda layers: layers.RNN([layers.LSTMCell(2)] * 2)),
    *MASKS,
]
