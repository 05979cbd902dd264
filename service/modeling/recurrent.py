"""Recurrent layers on a device: stacks of kernel calls, over vectors or over token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor

from kernels.backend import AUTO
from kernels.family import Family
from kernels.gru import FUSED as GRU
from kernels.lstm import FUSED as LSTM
from kernels.norm import layer_norm
from kernels.persistent.resident import Resident
from kernels.pooling import pool_steps
from kernels.ragged import ContractError, Encoded, Outputs, Ragged
from service.modeling.layers import KINDS
from service.modeling.runnable_layer import EMBEDDED, FOLDED, RunnableLayer, embed_ids, unique_tensors, weight_tensors
from service.modeling.spec.layers import GatedLayer, RecurrentLayer, SRULayer

RESIDENT = {cell.name: cell for cell in (LSTM, GRU)}
MERGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": lambda forward, backward: (forward + backward) / 2,
    "product": torch.mul,
}


@dataclass(frozen=True, slots=True)
class RecurrentLevel:
    """The weights of one level.

    directions: the weights of each direction, forward first; norm: (2, outputs) of a layer norm over the level's output, or None;
    backward: whether the only direction reads rows from their end; merge: how two directions are combined, a key of MERGES, or None to join
    them; starts: the state that rows start from, by its fields, for each direction, or none for zeros.
    """

    directions: tuple[Any, ...]
    norm: Tensor | None = None
    backward: bool = False
    merge: str | None = None
    starts: tuple[Mapping[str, Tensor], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the level reads rows from their beginning, and its output is that of the kernel."""
        return len(self.directions) == 1 and not self.backward and self.norm is None and self.merge is None

    def tensors(self) -> list[Tensor]:
        tensors = [tensor for weights in self.directions for tensor in weight_tensors(weights)]
        tensors += [tensor for start in self.starts for tensor in start.values()]
        return tensors if self.norm is None else [*tensors, self.norm]


class RecurrentStack(RunnableLayer):
    """`depth` levels of a recurrent layer, each in one or two directions. A level's output is [forward | backward]."""

    def __init__(self, family: Family, levels: list[RecurrentLevel], requested: str = AUTO) -> None:
        """requested: the kernels' backend, as in `kernels.backend.choose`."""
        self._family = family
        self._levels = levels
        self._requested = requested
        self._runs_levels = family.runs_levels and len(levels) > 1 and all(level.is_plain for level in levels)
        """Whether one call runs all levels."""
        self._embedding: Tensor | None = None
        self._folded: RecurrentLevel | None = None
        """The first level with the embedding folded in, if it takes ids that way."""

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        return self.run_chunk(x, want, None)[0]

    def run_chunk(self, x: Ragged, want: Outputs, states: Sequence[Any] | None) -> tuple[Encoded, list[Any]]:
        """Run the stack from `states`, one per level and direction, forward first; return the outputs and the new states."""
        states_before = repeat(None) if states is None else iter(states)
        states_after: list[Any] = []
        if self._embedding is not None:
            x = embed_ids(x, self._embedding)
        levels = [self._folded or self._levels[0], *self._levels[1:]]
        if self._runs_levels:
            return self._run_levels(levels, x, want, states)
        for level in levels:
            level_want = want if level is levels[-1] else Outputs(steps=True)
            encoded = self._run_level(level, x, level_want, tuple(islice(states_before, len(level.directions))))
            states_after += encoded.state if len(level.directions) == 2 else [encoded.state]
            if encoded.steps is not None:
                x = Ragged(encoded.steps, x.offsets)
        return encoded, states_after

    @property
    def state_names(self) -> list[str]:
        """The level and direction of each state, forward first, as in the names of weights."""
        return [
            f"{number}.{direction}"
            for number, level in enumerate(self._levels)
            for direction in (("backward",) if level.backward else ("forward", "backward")[: len(level.directions)])
        ]

    @property
    def streams(self) -> bool:
        return all(len(level.directions) == 1 and not level.backward for level in self._levels)

    @property
    def resumes_for_free(self) -> bool:
        return True

    def allocate_states(self, slots: int) -> list[Any]:
        levels = [self._folded or self._levels[0], *self._levels[1:]]
        return [state for level in levels for state in self._start(level, slots)]

    def resident(self, states: Sequence[Any], weight: Tensor, bias: Tensor) -> Resident:
        """Return the kernel that stays on the device and runs the stack and a linear layer step by step; raises ContractError for a stack
        that it does not run. states: of `allocate_states`."""
        cell = RESIDENT.get(self._family.name)
        if cell is None or self._requested != AUTO or not all(level.is_plain for level in self._levels):
            raise ContractError("a resident kernel runs an LSTM or a GRU that reads forward, without a pinned backend")
        return Resident(cell, [level.directions[0] for level in self._levels], states, weight, bias)

    def embed(self, table: Tensor) -> None:
        self._embedding, self._folded, self.takes_ids = table, None, EMBEDDED

    def fold(self, table: Tensor) -> None:
        first = self._levels[0]
        folded = tuple(weights.folded(table) for weights in first.directions)
        self._embedding, self._folded, self.takes_ids = None, replace(first, directions=folded), FOLDED

    @property
    def folded_columns(self) -> int:
        return sum(weights.table_columns for weights in self._levels[0].directions)

    def backend(self) -> str:
        levels = {"levels": len(self._levels)} if self._runs_levels else {}
        return self._family.choice(self._levels[0].directions[0], self._requested, **levels).backend.name

    def tensors(self) -> list[Tensor]:
        levels = self._levels if self._folded is None else [*self._levels, self._folded]
        tensors = [tensor for level in levels for tensor in level.tensors()]
        return unique_tensors(tensors if self._embedding is None else [*tensors, self._embedding])

    def _run_levels(
        self, levels: Sequence[RecurrentLevel], x: Ragged, want: Outputs, states: Sequence[Any] | None
    ) -> tuple[Encoded, list[Any]]:
        """Run plain levels in one call."""
        before = states
        if states is None and any(level.starts for level in levels):
            before = [state for level in levels for state in self._start(level, x.rows)]
        weights = [level.directions[0] for level in levels]
        encoded = self._family.levels(x, weights, before, want=want, backend=self._requested)
        return encoded, list(encoded.state)

    def _run_level(self, level: RecurrentLevel, x: Ragged, want: Outputs, states: tuple[Any, ...]) -> Encoded:
        """Run one level. The state is that of its direction, or a pair."""
        if level.starts and states[0] is None:
            states = self._start(level, x.rows)
        if level.merge is not None:
            return _merge(
                self._run_directions(level, x, replace(want, steps=True, mean=False, max=False), states), x, want, level.merge
            )
        if level.norm is not None:
            return _normalise(
                self._run_directions(level, x, Outputs(steps=True), states), x, want, level.norm, len(level.directions)
            )
        return self._run_directions(level, x, want, states)

    def _run_directions(self, level: RecurrentLevel, x: Ragged, want: Outputs, states: tuple[Any, ...]) -> Encoded:
        if len(level.directions) == 2:
            both = None if states[0] is None else states
            return self._family.bidirectional(x, level.directions, both, want=want, backend=self._requested)
        read = x.reversed() if level.backward else x
        encoded = self._family.run(read, level.directions[0], states[0], want=want, backend=self._requested)
        if level.backward and encoded.steps is not None:
            encoded = replace(encoded, steps=Ragged(encoded.steps, x.offsets).reversed().data)
        return encoded

    def _start(self, level: RecurrentLevel, entries: int) -> tuple[Any, ...]:
        """Return the states of rows that have no earlier chunk, one per direction, with this number of entries."""
        states = tuple(self._family.zero_state(weights, entries) for weights in level.directions)
        for state, start in zip(states, level.starts, strict=False):
            for name, value in start.items():
                getattr(state, name).copy_(value)
        return states


def build(
    layer: RecurrentLayer, inputs: int, weights: Mapping[str, Tensor], *, int8: bool = False, requested: str = AUTO
) -> RecurrentStack:
    """Return the stack of a recurrent layer. Its weights are on their device already; inputs: the layer's input width; int8: whether
    products may take int8 numbers; requested: the kernels' backend, as in `kernels.backend.choose`."""
    kind, levels = KINDS[layer.kind], []  # type: ignore[attr-defined]  # every layer of a model has a kind
    for level in range(layer.depth):
        shared = {name: weights[f"{level}.{name}"] for name in layer.shared(inputs)}
        directions = []
        for backward, direction in enumerate(layer.directions):
            arrays = {name: weights[f"{level}.{direction}.{name}"] for name in layer.weights(inputs)}
            directions.append(replace(kind.weights(layer, inputs, backward, arrays | shared), int8=int8))
        norm_after = isinstance(layer, SRULayer) and layer.layer_norm == "after"
        merge = layer.merge if isinstance(layer, GatedLayer) and layer.merge != "concat" else None
        starts = tuple(_learned_start(weights, f"{level}.{direction}.") for direction in layer.directions)
        levels.append(
            RecurrentLevel(
                tuple(directions),
                shared["norm"] if norm_after else None,
                backward=layer.direction == "backward",
                merge=merge,
                starts=starts if any(starts) else (),
            )
        )
        inputs = layer.outputs
    return RecurrentStack(kind.family, levels, requested)


def _learned_start(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the state that a direction starts from, by the fields of its state, as far as the weights have it."""
    named = {"hidden": f"{prefix}start", "cell": f"{prefix}start_cell"}
    return {field: weights[name] for field, name in named.items() if name in weights}


def _merge(encoded: Encoded, x: Ragged, want: Outputs, merge: str) -> Encoded:
    """Return the wanted outputs of two directions that are combined number by number."""

    def merged(joined: Tensor | None) -> Tensor | None:
        return None if joined is None else MERGES[merge](*joined.chunk(2, dim=1))

    steps = merged(encoded.steps)
    assert steps is not None
    pooled = pool_steps(steps, x.offsets, replace(want, last=False), directions=1)
    return replace(pooled, last=merged(encoded.last), state=encoded.state)


def _normalise(encoded: Encoded, x: Ragged, want: Outputs, norm: Tensor, directions: int) -> Encoded:
    """Return the wanted outputs after the layer norm over the level's steps."""
    assert encoded.steps is not None
    return replace(pool_steps(layer_norm(encoded.steps, norm), x.offsets, want, directions=directions), state=encoded.state)
