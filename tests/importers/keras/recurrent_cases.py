"""Recurrent layers, in one direction and both."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.importers.keras.builders import FEATURES, STEPS, UNITS, Case, both, cell, dense, functional, one, over_features

RECURRENT = ("LSTM", "GRU", "SimpleRNN")
GATE_ACTIVATIONS = ("sigmoid", "hard_sigmoid", "relu6", "softsign")


def _recurrent_cases(kind: str) -> list[Case]:
    gates: list[str] = [] if kind == "SimpleRNN" else list(GATE_ACTIVATIONS)
    return [
        Case(kind, "return_sequences", over_features(cell(kind, **STEPS))),
        Case(kind, "last output", over_features(cell(kind))),
        Case(kind, "use_bias=False", over_features(cell(kind, use_bias=False, **STEPS))),
        Case(kind, "go_backwards", over_features(cell(kind, go_backwards=True))),
        Case(kind, "go_backwards, two layers", over_features(cell(kind, go_backwards=True, **STEPS), cell(kind))),
        Case(kind, "dropout", over_features(cell(kind, dropout=0.5, recurrent_dropout=0.5))),
        Case(kind, "unroll", over_features(cell(kind, unroll=True), steps=5), lengths=(5, 5)),
        Case(kind, "two layers", over_features(cell(kind, **STEPS), cell(kind, **STEPS))),
        *(
            Case(kind, f'activation "{name}"', over_features(cell(kind, activation=name, **STEPS)), lengths=(4, 2))
            for name in ("relu", "sigmoid", "linear", "hard_tanh", "elu")
        ),
        *(
            Case(
                kind,
                f'recurrent_activation "{name}"',
                over_features(cell(kind, recurrent_activation=name, **STEPS)),
                lengths=(4, 2),
            )
            for name in gates
        ),
        *(
            Case("Bidirectional", f'{kind}, merge_mode "{mode}"', over_features(both(kind, mode)))
            for mode in ("concat", "sum", "mul", "ave")
        ),
        *(
            Case("Bidirectional", f'{kind}, merge_mode "{mode}", return_sequences', over_features(both(kind, mode, **STEPS)))
            for mode in ("concat", "sum", "mul", "ave")
        ),
        Case("Bidirectional", f"{kind}, use_bias=False", over_features(both(kind, use_bias=False))),
        Case("Bidirectional", f"{kind}, forward layer with go_backwards", over_features(partial(_swapped, kind), cell(kind))),
        Case("Bidirectional", f"{kind}, two layers", over_features(both(kind, **STEPS), both(kind), dense())),
        Case("RNN", f"{kind}Cell", over_features(lambda layers: layers.RNN(getattr(layers, f"{kind}Cell")(UNITS), **STEPS))),
        Case(
            kind, "return_state, final hidden state", functional(lambda layers, x: cell(kind, return_state=True)(layers)(x)[1])
        ),
    ]


def _swapped(kind: str, layers: Any) -> Any:
    """Return a bidirectional layer with a forward layer that reads backward."""
    forward, backward = (getattr(layers, kind)(UNITS, go_backwards=reads_backward, **STEPS) for reads_backward in (True, False))
    return layers.Bidirectional(forward, backward_layer=backward)


def _without_merge(layers: Any, x: Any) -> Any:
    forward, backward = both("LSTM", None, **STEPS)(layers)(x)
    return layers.Concatenate()([forward, backward])


def _final_states(layers: Any, x: Any) -> Any:
    """The usual encoder: final hidden states of both directions, joined."""
    _, forward, _, backward, _ = both("LSTM", return_state=True)(layers)(x)
    return layers.Dense(2)(layers.Concatenate()([forward, backward]))


def _two_sizes(layers: Any) -> Any:
    backward = layers.LSTM(UNITS, go_backwards=True, activation="relu")
    return layers.Bidirectional(layers.LSTM(UNITS), backward_layer=backward)


def _own_backward(layers: Any) -> Any:
    return layers.Bidirectional(layers.GRU(UNITS), backward_layer=layers.GRU(UNITS, go_backwards=True))


def _initial_state(layers: Any, x: Any) -> Any:
    _, hidden = layers.GRU(UNITS, return_state=True)(x)
    return layers.GRU(UNITS)(x, initial_state=hidden)


def _stateful(keras: Any) -> Any:
    return keras.Sequential([keras.Input((None, FEATURES), batch_size=1), keras.layers.LSTM(UNITS, stateful=True)])


def _cell_state(layers: Any, x: Any) -> Any:
    return layers.LSTM(UNITS, return_state=True)(x)[2]


def _two_cells(layers: Any) -> Any:
    return layers.RNN([layers.LSTMCell(2), layers.LSTMCell(2)])


_CONV_LSTM = (one("Reshape", target_shape=(5, FEATURES, 1)), one("ConvLSTM1D", filters=2, kernel_size=1))

MORE_RECURRENT = [
    Case("GRU", "reset_after=False", over_features(cell("GRU", reset_after=False, **STEPS))),
    Case("GRU", "reset_after=False, use_bias=False", over_features(cell("GRU", reset_after=False, use_bias=False))),
    Case("GRU", "reset_after=False in both directions", over_features(both("GRU", reset_after=False))),
    Case("LSTM", "unit_forget_bias=False", over_features(cell("LSTM", unit_forget_bias=False))),
    Case("LSTM", "stateful", _stateful),
    Case("Bidirectional", "merge_mode None, joined", functional(_without_merge)),
    Case("Bidirectional", "return_state, final hidden states joined", functional(_final_states)),
    Case("Bidirectional", "backward_layer with the same options", over_features(_own_backward)),
    Case("Bidirectional", "backward_layer with other options", over_features(_two_sizes), "different options"),
    Case("GRU", "initial_state from a layer", functional(_initial_state), "initial states are tensors of the model"),
    Case("LSTM", "return_state, final cell state", functional(_cell_state), "is a cell state"),
    Case("LSTM", 'activation "mish"', over_features(cell("LSTM", activation="mish")), "its activation is 'mish'"),
    Case("RNN", "several cells", over_features(_two_cells), "its cell is 'StackedRNNCells'"),
    Case("ConvLSTM1D", "any", over_features(*_CONV_LSTM, steps=5), "layers of this class cannot be imported"),
]


CASES = (*(case for kind in RECURRENT for case in _recurrent_cases(kind)), *MORE_RECURRENT)
