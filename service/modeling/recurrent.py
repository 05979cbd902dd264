"""Recurrent layers on a device: depth composed around the kernels, and the ways in from token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor

from kernels import gru as gru_kernel
from kernels import lstm as lstm_kernel
from kernels import qrnn as qrnn_kernel
from kernels import sru as sru_kernel
from kernels.contract import (
    Encoded,
    GRUState,
    GRUWeights,
    LSTMState,
    LSTMWeights,
    Outputs,
    QRNNState,
    QRNNWeights,
    Ragged,
    SRUState,
    SRUWeights,
)
from kernels.directions import composed
from kernels.embedding import fold, fold_taps, folded_bytes
from kernels.norm import layer_norm
from kernels.pooling import pooled
from service.modeling.layer import EMBEDDED, FOLDED, Runs, embedded, once, tensors_of
from service.modeling.spec import GRULayer, LSTMLayer, QRNNLayer, RecurrentLayer, SRULayer


@dataclass(frozen=True, slots=True)
class Family:
    """What a stack has to know of a recurrent kernel: how it runs one direction, and both, and which backend it takes.

    `fold` gives the weights of one direction as they take ids, from those that take vectors and the embedding; `bytes` what the tables
    in them will hold; `slab` room for the states of so many sequences in one direction.
    """

    run: Callable[..., Encoded]
    both: Callable[..., Encoded]
    choice: Callable[..., Any]
    fold: Callable[[Any, Tensor], Any]
    bytes: Callable[[Any, Tensor], int]
    slab: Callable[[Any, int], Any]


@dataclass(frozen=True, slots=True)
class Level:
    """The weights of each direction, forward first. norm: (2, outputs) of a layer norm of all that comes out, or None."""

    directions: tuple[Any, ...]
    norm: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        held = [tensor for weights in self.directions for tensor in tensors_of(weights)]
        return held if self.norm is None else [*held, self.norm]


class Stack(Runs):
    """`depth` levels of a recurrent layer, each in one or two directions; a level's directions are joined as [forward | backward]."""

    def __init__(self, family: Family, levels: list[Level]) -> None:
        self._family = family
        self._levels = levels
        self._embedding: Tensor | None = None
        self._folded: Level | None = None
        """The first level as it takes ids, if it does."""

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        return self.chunk(x, want, None)[0]

    def chunk(self, x: Ragged, want: Outputs, states: Sequence[Any] | None) -> tuple[Encoded, list[Any]]:
        """Goes on from `states`, which go level by level, forward first; returns what comes out and the states after it."""
        left = repeat(None) if states is None else iter(states)
        after: list[Any] = []
        if self._embedding is not None:
            x = embedded(x, self._embedding)
        levels = [self._folded or self._levels[0], *self._levels[1:]]
        for level in levels:
            wanted = want if level is levels[-1] else Outputs(steps=True)
            encoded = self._level(level, x, wanted, tuple(islice(left, len(level.directions))))
            after += encoded.state
            if encoded.steps is not None:
                x = Ragged(encoded.steps, x.offsets)
        return encoded, after

    @property
    def streams(self) -> bool:
        return all(len(level.directions) == 1 for level in self._levels)

    @property
    def free_states(self) -> bool:
        return True

    def slabs(self, places: int) -> list[Any]:
        levels = [self._folded or self._levels[0], *self._levels[1:]]
        return [self._family.slab(weights, places) for level in levels for weights in level.directions]

    def embed(self, table: Tensor) -> None:
        self._embedding, self._folded, self.takes_ids = table, None, EMBEDDED

    def fold(self, table: Tensor) -> None:
        first = self._levels[0]
        folded = tuple(self._family.fold(weights, table) for weights in first.directions)
        self._embedding, self._folded, self.takes_ids = None, replace(first, directions=folded), FOLDED

    def folded_bytes(self, table: Tensor) -> int:
        return sum(self._family.bytes(weights, table) for weights in self._levels[0].directions)

    def backend(self) -> str:
        name: str = self._family.choice(self._levels[0].directions[0]).backend.name
        return name

    def tensors(self) -> list[Tensor]:
        levels = self._levels if self._folded is None else [*self._levels, self._folded]
        held = [tensor for level in levels for tensor in level.tensors()]
        return once(held if self._embedding is None else [*held, self._embedding])

    def _level(self, level: Level, x: Ragged, want: Outputs, states: tuple[Any, ...]) -> Encoded:
        """What one level gives, with the states of its directions."""
        wanted = want if level.norm is None else Outputs(steps=True)
        if len(level.directions) == 1:
            encoded = self._family.run(x, level.directions[0], states[0], want=wanted)
            encoded = replace(encoded, state=(encoded.state,))
        else:
            encoded = self._family.both(x, level.directions, None if states[0] is None else states, want=wanted)
        return encoded if level.norm is None else _normalised(encoded, x, want, level)


def build(layer: RecurrentLayer, inputs: int, held: Mapping[str, Tensor]) -> Stack:
    """The layer of its weights, which are on their device; `inputs` is the width of what comes in."""
    levels = []
    for level in range(layer.depth):
        shared = {name: held[f"{level}.{name}"] for name in layer.shared(inputs)}
        directions = tuple(
            _weights(
                layer, inputs, backward, {name: held[f"{level}.{direction}.{name}"] for name in layer.weights(inputs)} | shared
            )
            for backward, direction in enumerate(layer.directions)
        )
        after = isinstance(layer, SRULayer) and layer.layer_norm == "after"
        levels.append(Level(directions, shared["norm"] if after else None))
        inputs = layer.outputs
    return Stack(FAMILIES[type(layer)], levels)


def _weights(layer: RecurrentLayer, inputs: int, backward: int, arrays: Mapping[str, Tensor]) -> Any:
    """One level in one direction, as the kernel of its family takes it."""
    if isinstance(layer, LSTMLayer):
        return LSTMWeights(arrays["input"], arrays["recurrent"], arrays["bias"])
    if isinstance(layer, GRULayer):
        return GRUWeights(arrays["input"], arrays["recurrent"], arrays["bias"], arrays.get("recurrent_bias"))
    if isinstance(layer, QRNNLayer):
        return QRNNWeights(arrays["input"], arrays["bias"], layer.pooling)
    assert isinstance(layer, SRULayer)
    own_columns = backward * layer.hidden if layer.skip and layer.blocks(inputs) == 3 else None
    return SRUWeights(
        arrays["input"],
        arrays["bias"],
        arrays.get("cell"),
        arrays.get("projection"),
        skip_from=own_columns,
        scale=layer.scale,
        tanh=layer.activation == "tanh",
        norm=arrays["norm"] if layer.layer_norm == "before" else None,
    )


def _normalised(encoded: Encoded, x: Ragged, want: Outputs, level: Level) -> Encoded:
    """Every output of the level's normalised steps."""
    assert encoded.steps is not None and level.norm is not None
    steps = layer_norm(encoded.steps, level.norm)
    return replace(pooled(steps, x.offsets, want, directions=len(level.directions)), state=encoded.state)


@dataclass(frozen=True, slots=True)
class GatesOfIds:
    """An LSTM's or a GRU's weights without its product, and the table of its gate inputs."""

    table: Tensor
    rest: LSTMWeights | GRUWeights


def _of_ids_too(run: Callable[..., Encoded]) -> Callable[..., Encoded]:
    """A kernel that takes no ids, whose gate inputs are gathered for it where its weights are GatesOfIds."""

    def run_of_ids_too(x: Ragged, weights: Any, state: Any, *, want: Outputs) -> Encoded:
        if isinstance(weights, GatesOfIds):
            return run(embedded(x, weights.table), weights.rest, state, want=want)
        return run(x, weights, state, want=want)

    return run_of_ids_too


def _fold_gates(weights: LSTMWeights | GRUWeights, table: Tensor) -> GatesOfIds:
    assert weights.input is not None
    return GatesOfIds(fold(table, weights.input, weights.bias), replace(weights, input=None, bias=None))


def _gate_bytes(weights: LSTMWeights | GRUWeights, table: Tensor) -> int:
    assert weights.input is not None
    return folded_bytes(table, weights.input.shape[1])


def _fold_sru(weights: SRUWeights, table: Tensor) -> SRUWeights:
    """A skip that is the input itself becomes a block of the table."""
    assert weights.input is not None
    product = weights.input if weights.projection is None else weights.projection.float() @ weights.input.float()
    seen = table if weights.norm is None else layer_norm(table, weights.norm)
    blocks = fold(seen, product)
    if weights.skip_from is not None:
        own = table[:, weights.skip_from : weights.skip_from + weights.hidden].float() * weights.scale
        blocks = torch.cat((blocks, own.to(blocks.dtype)), dim=1)
    return replace(weights, input=None, projection=None, skip_from=None, norm=None, table=blocks.to(table.dtype))


def _sru_bytes(weights: SRUWeights, table: Tensor) -> int:
    assert weights.input is not None
    return folded_bytes(table, weights.input.shape[1] + (0 if weights.skip_from is None else weights.hidden))


def _fold_qrnn(weights: QRNNWeights, table: Tensor) -> QRNNWeights:
    assert weights.input is not None
    return replace(weights, input=None, tables=fold_taps(table, weights.input, dense=True))


def _qrnn_bytes(weights: QRNNWeights, table: Tensor) -> int:
    assert weights.input is not None
    return folded_bytes(table, weights.input.shape[2], taps=weights.window, dense=True)


def _lstm_slab(weights: LSTMWeights | GatesOfIds, places: int) -> LSTMState:
    return LSTMState(_zeros(weights, places), _zeros(weights, places))


def _gru_slab(weights: GRUWeights | GatesOfIds, places: int) -> GRUState:
    return GRUState(_zeros(weights, places))


def _sru_slab(weights: SRUWeights, places: int) -> SRUState:
    return SRUState(_zeros(weights, places))


def _qrnn_slab(weights: QRNNWeights, places: int) -> QRNNState:
    before = weights.window - 1
    if weights.tables is not None:
        left = torch.zeros(places, before, dtype=torch.int64, device=weights.bias.device)
    else:
        assert weights.input is not None
        left = weights.input.new_zeros(places, before, weights.input.shape[1])
    return QRNNState(_zeros(weights, places), left)


def _zeros(weights: Any, places: int) -> Tensor:
    """(places, hidden) float32."""
    one = weights.rest.recurrent if isinstance(weights, GatesOfIds) else weights.bias
    hidden = weights.rest.hidden if isinstance(weights, GatesOfIds) else weights.hidden
    return torch.zeros(places, hidden, dtype=torch.float32, device=one.device)


_lstm, _gru = _of_ids_too(lstm_kernel.lstm), _of_ids_too(gru_kernel.gru)
FAMILIES: dict[type[RecurrentLayer], Family] = {
    LSTMLayer: Family(_lstm, composed(_lstm), lstm_kernel.choice, _fold_gates, _gate_bytes, _lstm_slab),
    GRULayer: Family(_gru, composed(_gru), gru_kernel.choice, _fold_gates, _gate_bytes, _gru_slab),
    SRULayer: Family(sru_kernel.sru, sru_kernel.both, sru_kernel.choice, _fold_sru, _sru_bytes, _sru_slab),
    QRNNLayer: Family(qrnn_kernel.qrnn, qrnn_kernel.both, qrnn_kernel.choice, _fold_qrnn, _qrnn_bytes, _qrnn_slab),
}
