"""Recurrent layers on a device: depth and directions composed around the kernels, and the ways in from token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels import gru as gru_kernel
from kernels import lstm as lstm_kernel
from kernels import qrnn as qrnn_kernel
from kernels import sru as sru_kernel
from kernels.contract import (
    Encoded,
    GRUWeights,
    LSTMWeights,
    Outputs,
    QRNNWeights,
    Ragged,
    SRUWeights,
    arithmetic,
    reversal,
)
from kernels.embedding import embed, embed_taps, fold, fold_taps, folded_bytes, tap_rows
from kernels.windows import left_context
from service.zoo.layer import EMBEDDED, FOLDED, Runs, once, side_by_side, tensors_of
from service.zoo.spec import GRULayer, LSTMLayer, QRNNLayer, RecurrentLayer, SRULayer


class Gather:
    """From rows of ids to what a kernel takes, in one direction; `tensors` are what it gathers from."""

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        self.tensors = [table]
        self._dtype = dtype

    def __call__(self, ids: Ragged, state: Any) -> tuple[Ragged, Any]:
        """What the kernel takes for these ids, and the state that it takes."""
        return Ragged(embed(ids.data, self.tensors[0], self._dtype), ids.offsets), state

    def after(self, ids: Ragged, before: Any, after: Any) -> Any:
        """The state to go on from, of the one that the kernel left."""
        return after


class TapGather(Gather):
    """Through the tables of a window over time. The steps before a chunk are kept as ids, not as vectors."""

    def __init__(self, tables: Tensor) -> None:
        super().__init__(tables, torch.float32)
        self._left = len(tables) - 1

    def __call__(self, ids: Ragged, state: Any) -> tuple[Ragged, Any]:
        (tables,) = self.tensors
        gates = embed_taps(ids, tables, left=self._left, context=None if state is None else state.left)
        nothing = gates.new_zeros(ids.rows, 0, gates.shape[1])
        return Ragged(gates, ids.offsets), None if state is None else replace(state, left=nothing)

    def after(self, ids: Ragged, before: Any, after: Any) -> Any:
        context = None if before is None else before.left
        return replace(after, left=left_context(tap_rows(ids), self._left, context))


@dataclass(frozen=True, slots=True)
class Family:
    """What a stack has to know of a recurrent kernel.

    `fold` gives the gather of one direction from its weights and the embedding, `rest` the weights that remain, `bytes` what the
    gather will hold.
    """

    run: Callable[..., Encoded]
    choice: Callable[..., Any]
    fold: Callable[[Any, Tensor], Gather]
    rest: Callable[[Any], Any]
    bytes: Callable[[Any, Tensor], int]


class Stack(Runs):
    """`depth` levels of a recurrent layer, each in one or two directions; a level's directions are joined as [forward | backward]."""

    def __init__(self, family: Family, levels: list[list[Any]]) -> None:
        self._family = family
        self._levels = levels
        self._gathers: list[Gather] = []
        self._after_gathers: list[Any] = []
        """The first level's weights as its kernel takes them after the gathers: without what was folded."""

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        return self.chunk(x, want, None)[0]

    def chunk(self, x: Ragged, want: Outputs, states: Sequence[Any] | None) -> tuple[Encoded, list[Any]]:
        """Goes on from `states`, which go level by level, forward first; returns what comes out and the states after it."""
        left = iter(states) if states is not None else None
        after: list[Any] = []
        for level in self._levels:
            wanted = want if level is self._levels[-1] else Outputs(steps=True)
            gathers = self._gathers if level is self._levels[0] else []
            parts = [
                self._directed(x, weights, wanted, backward, gathers, next(left) if left else None)
                for backward, weights in enumerate(level)
            ]
            after += [part.state for part in parts]
            joined = side_by_side(parts)
            if joined.steps is not None:
                x = Ragged(joined.steps, x.offsets)
        return joined, after

    def embed(self, table: Tensor) -> None:
        gather = Gather(table, arithmetic(table.dtype, table.device))
        self._gathers, self._after_gathers = [gather] * len(self._levels[0]), self._levels[0]
        self.takes_ids = EMBEDDED

    def fold(self, table: Tensor) -> None:
        self._gathers = [self._family.fold(weights, table) for weights in self._levels[0]]
        self._after_gathers = [self._family.rest(weights) for weights in self._levels[0]]
        self.takes_ids = FOLDED

    def folded_bytes(self, table: Tensor) -> int:
        return sum(self._family.bytes(weights, table) for weights in self._levels[0])

    def backend(self) -> str:
        name: str = self._family.choice(self._levels[0][0]).backend.name
        return name

    def tensors(self) -> list[Tensor]:
        held = [tensor for level in (*self._levels, self._after_gathers) for weights in level for tensor in tensors_of(weights)]
        return once(held + [tensor for gather in self._gathers for tensor in gather.tensors])

    def _directed(
        self, x: Ragged, weights: Any, want: Outputs, backward: int, gathers: Sequence[Gather], state: Any
    ) -> Encoded:
        rows = x.reversed() if backward else x
        if gathers:
            encoded = self._from_ids(rows, self._after_gathers[backward], want, gathers[backward], state)
        else:
            encoded = self._family.run(rows, weights, state, want=want)
        if not backward or encoded.steps is None:
            return encoded
        return replace(encoded, steps=encoded.steps.index_select(0, reversal(x.offsets, len(encoded.steps))))

    def _from_ids(self, ids: Ragged, weights: Any, want: Outputs, gather: Gather, state: Any) -> Encoded:
        x, taken = gather(ids, state)
        encoded = self._family.run(x, weights, taken, want=want)
        return replace(encoded, state=gather.after(ids, state, encoded.state))


def build(layer: RecurrentLayer, inputs: int, held: Mapping[str, Tensor]) -> Stack:
    """The layer of its weights, which are on their device; `inputs` is the width of what comes in."""
    levels = []
    for level in range(layer.depth):
        levels.append(
            [
                _weights(layer, inputs, backward, {name: held[f"{level}.{direction}.{name}"] for name in layer.weights(inputs)})
                for backward, direction in enumerate(layer.directions)
            ]
        )
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
    )


def _fold_gates(weights: LSTMWeights | GRUWeights, table: Tensor) -> Gather:
    assert weights.input is not None
    return Gather(fold(table, weights.input, weights.bias), arithmetic(table.dtype, table.device))


def _gate_bytes(weights: LSTMWeights | GRUWeights, table: Tensor) -> int:
    assert weights.input is not None
    return folded_bytes(table, weights.input.shape[1])


def _fold_sru(weights: SRUWeights, table: Tensor) -> Gather:
    """A skip that is the input itself becomes a block of the table."""
    assert weights.input is not None
    product = weights.input if weights.projection is None else weights.projection.float() @ weights.input.float()
    blocks = fold(table, product)
    if weights.skip_from is not None:
        own = table[:, weights.skip_from : weights.skip_from + weights.hidden].float() * weights.scale
        blocks = torch.cat((blocks, own.to(blocks.dtype)), dim=1)
    return Gather(blocks, torch.float32)


def _sru_bytes(weights: SRUWeights, table: Tensor) -> int:
    assert weights.input is not None
    return folded_bytes(table, weights.input.shape[1] + (0 if weights.skip_from is None else weights.hidden))


def _fold_qrnn(weights: QRNNWeights, table: Tensor) -> Gather:
    assert weights.input is not None
    return TapGather(
        fold_taps(table, weights.input.flip(0))
    )  # tap 0 of the window is the present step, of a filter the earliest


def _qrnn_bytes(weights: QRNNWeights, table: Tensor) -> int:
    assert weights.input is not None
    return folded_bytes(table, weights.input.shape[2], taps=weights.window)


def _without_product(weights: LSTMWeights | GRUWeights) -> LSTMWeights | GRUWeights:
    return replace(weights, input=None, bias=None)


FAMILIES: dict[type[RecurrentLayer], Family] = {
    LSTMLayer: Family(lstm_kernel.lstm, lstm_kernel.choice, _fold_gates, _without_product, _gate_bytes),
    GRULayer: Family(gru_kernel.gru, gru_kernel.choice, _fold_gates, _without_product, _gate_bytes),
    SRULayer: Family(
        sru_kernel.sru,
        sru_kernel.choice,
        _fold_sru,
        lambda weights: replace(weights, input=None, projection=None, skip_from=None),
        _sru_bytes,
    ),
    QRNNLayer: Family(
        qrnn_kernel.qrnn, qrnn_kernel.choice, _fold_qrnn, lambda weights: replace(weights, input=None), _qrnn_bytes
    ),
}
