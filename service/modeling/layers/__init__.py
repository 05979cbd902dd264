"""What is known about each kind of recurrent layer, one descriptor a kind, besides its table in `service.modeling.spec.layers`."""

from __future__ import annotations

from service.modeling.layers.gru import GRU
from service.modeling.layers.kind import Framework, RecurrentKind
from service.modeling.layers.lstm import LSTM
from service.modeling.layers.mingru import MINGRU
from service.modeling.layers.qrnn import QRNN
from service.modeling.layers.rnn import RNN
from service.modeling.layers.sru import SRU
from service.modeling.spec.layers import GatedLayer

KINDS: dict[str, RecurrentKind] = {kind.name: kind for kind in (RNN, LSTM, GRU, SRU, QRNN, MINGRU)}
"""The descriptors by the kind of model.toml."""
GATED = {name: kind for name, kind in KINDS.items() if issubclass(kind.table, GatedLayer)}
"""The kinds with a product of the hidden state at every step."""


def kinds_by_name(framework: Framework) -> dict[str, str]:
    """Return the kinds of a framework's classes, operators or cells, by their names."""
    return {name: kind.name for kind in GATED.values() for name in kind.names.get(framework, ())}
