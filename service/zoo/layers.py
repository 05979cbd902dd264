"""Layers on a device: depth and directions composed around one kernel, and the embedding in front of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.contract import Encoded, LSTMState, LSTMWeights, Outputs, Ragged, arithmetic, reversal
from kernels.embedding import embed, fold, folded_bytes
from kernels.lstm import choice, lstm
from service.zoo.spec import LSTMLayer


class LSTMStack:
    """`depth` LSTM layers, each in one or two directions; a level's directions are joined as [forward | backward]."""

    def __init__(self, layer: LSTMLayer, arrays: Mapping[str, Tensor], device: torch.device) -> None:
        self.levels = [
            [_weights(arrays, f"{level}.{direction}", device) for direction in layer.directions] for level in range(layer.depth)
        ]

    def __call__(
        self, x: Ragged, want: Outputs, first: FirstInput | None = None, states: Sequence[LSTMState] | None = None
    ) -> tuple[Encoded, list[LSTMState]]:
        """Encode `x`. `first` makes the lowest level's inputs of token ids; `states` go level by level, forward first.

        Returns what is wanted of the top level, and every state in the order in which `states` are taken.
        """
        left = iter(states) if states is not None else None
        after: list[LSTMState] = []
        for level in self.levels:
            top = level is self.levels[-1]
            encoded = [
                _directed(x, weights, want if top else Outputs(steps=True), backward, first, next(left) if left else None)
                for backward, weights in enumerate(level)
            ]
            after += [one.state for one in encoded]
            joined = _joined(encoded)
            if joined.steps is not None:
                x, first = Ragged(joined.steps, x.offsets), None
        return joined, after

    def backend(self) -> str:
        """Name of the kernel backend that runs these layers."""
        return choice(self.levels[0][0]).backend.name

    def tensors(self) -> list[Tensor]:
        return [
            tensor
            for level in self.levels
            for weights in level
            for tensor in (weights.input, weights.recurrent, weights.bias)
            if tensor is not None
        ]


class FirstInput:
    """What stands before the lowest level: from token ids and a direction's weights to what the kernel takes."""

    name: str

    def __call__(self, ids: Ragged, weights: LSTMWeights, backward: bool) -> tuple[Ragged, LSTMWeights]:
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        raise NotImplementedError


class Embedded(FirstInput):
    """Ids to vectors; the kernel multiplies them."""

    name = "embedding and product"

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, ids: Ragged, weights: LSTMWeights, backward: bool) -> tuple[Ragged, LSTMWeights]:
        dtype = arithmetic(self._table.dtype, self._table.device)
        return Ragged(embed(ids.data, self._table, dtype), ids.offsets), weights

    def tensors(self) -> list[Tensor]:
        return [self._table]


class Folded(FirstInput):
    """Ids to gate inputs by one table per direction, computed at load; the kernel has no input product left."""

    name = "folded table"

    def __init__(self, table: Tensor, lowest: Sequence[LSTMWeights]) -> None:
        self._tables = [fold(table, *_product(weights)) for weights in lowest]

    def __call__(self, ids: Ragged, weights: LSTMWeights, backward: bool) -> tuple[Ragged, LSTMWeights]:
        gates = embed(ids.data, self._tables[backward], torch.float32)
        return Ragged(gates, ids.offsets), LSTMWeights(None, weights.recurrent, None)

    def tensors(self) -> list[Tensor]:
        return self._tables

    @staticmethod
    def bytes(table: Tensor, lowest: Sequence[LSTMWeights]) -> int:
        """Bytes of the tables, known before they are made."""
        return sum(folded_bytes(table, 4 * weights.hidden) for weights in lowest)


def _product(weights: LSTMWeights) -> tuple[Tensor, Tensor]:
    assert weights.input is not None and weights.bias is not None, "only weights with an input product can be folded"
    return weights.input, weights.bias


def _weights(arrays: Mapping[str, Tensor], prefix: str, device: torch.device) -> LSTMWeights:
    def on_device(name: str) -> Tensor:
        array = arrays[f"{prefix}.{name}"]
        return array.to(device, arithmetic(array.dtype, device))

    return LSTMWeights(on_device("input"), on_device("recurrent"), on_device("bias"))


def _directed(
    x: Ragged, weights: LSTMWeights, want: Outputs, backward: int, first: FirstInput | None, state: LSTMState | None
) -> Encoded:
    rows = x.reversed() if backward else x
    if first is not None:
        rows, weights = first(rows, weights, bool(backward))
    encoded = lstm(rows, weights, state, want=want)
    if not backward or encoded.steps is None:
        return encoded
    steps = encoded.steps.index_select(0, reversal(x.offsets))
    return Encoded(encoded.state, steps, encoded.last, encoded.mean, encoded.max)


def _joined(parts: Sequence[Encoded]) -> Encoded:
    if len(parts) == 1:
        return parts[0]

    def side_by_side(name: str) -> Tensor | None:
        given = [getattr(part, name) for part in parts]
        return None if given[0] is None else torch.cat(given, dim=1)

    return Encoded(parts[0].state, *(side_by_side(name) for name in ("steps", "last", "mean", "max")))
