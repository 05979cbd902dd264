"""Shared by all kernel families: ragged batches, outputs, state slots, dtypes and the checks of shapes.

Vectors are rows: ``y = x @ W + b``. A batch is ragged: its rows are packed end to end without padding. The functions here compute
no encodings; the checks raise ContractError before a kernel reads out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Sizes = NDArray[np.int64]
"""Steps, lengths and positions on the host, where small arrays are cheap."""

STORAGE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes of stored weights, by name."""


class ContractError(ValueError):
    """An argument that a kernel does not accept. The message names the argument, its value and the expected value."""


def compute_dtype(storage: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products. A CPU only stores float16 and bfloat16 and computes in float32.

    Cells and sums are float32 on every device.
    """
    return torch.float32 if device.type == "cpu" else storage


@dataclass(frozen=True)
class Ragged:
    """Sequences packed end to end.

    data: (tokens, ...); offsets: (rows + 1,) int32 or int64 on data's device, from 0 to tokens, non-decreasing. On a GPU the offsets
    are not checked and may end before the data: the tokens after the last row belong to no row, and their outputs are undefined.
    """

    data: Tensor
    offsets: Tensor

    @property
    def rows(self) -> int:
        return self.offsets.shape[0] - 1

    @cached_property
    def lengths(self) -> Sizes:
        """Steps of each row, (rows,), on the host. On a GPU the first access waits for the device."""
        return np.diff(self.offsets.cpu().numpy()).astype(np.int64)

    def reversed(self) -> Ragged:
        """Return the batch with the steps of every row in reverse order."""
        return Ragged(self.data.index_select(0, reversal_index(self.offsets, len(self.data))), self.offsets)


@dataclass(frozen=True, slots=True)
class Outputs:
    """Which outputs leave the device. Outputs that are not requested are not written."""

    steps: bool = False
    last: bool = False
    mean: bool = False
    max: bool = False


@dataclass(frozen=True, slots=True)
class Encoded:
    """The requested outputs in float32, steps (tokens, hidden) and last, mean, max (rows, hidden), and the state after the last step.

    offsets: the offsets of `steps` where they differ from the input's. A row without steps has a mean and max of zero; its last is the
    hidden state that it started from, or zero in a family without a hidden state. scores: (rows, labels) float32, the result of a
    classifier on the maximum, where the kernel received one.
    """

    state: Any
    steps: Tensor | None = None
    last: Tensor | None = None
    mean: Tensor | None = None
    max: Tensor | None = None
    offsets: Tensor | None = None
    scores: Tensor | None = None


class LayerWeights:
    """The weights of one layer in one direction, of any family. Values must not change after the first call."""

    gates: ClassVar[tuple[str, ...]]
    """The blocks of `hidden` columns of the input weights, in their order."""

    @property
    def hidden(self) -> int:
        raise NotImplementedError

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """What these weights have beyond the plain layer of their family."""
        return ()

    @property
    def vector(self) -> int:
        """Width of the output and of the hidden state."""
        return self.hidden

    @property
    def array(self) -> Tensor:
        """An array that all weights of the family have."""
        raise NotImplementedError

    def folded(self, embedding: Tensor) -> Self:
        """Return the weights of a layer over token ids: an embedding, (vocabulary, inputs), and then this layer."""
        raise NotImplementedError

    @property
    def table_columns(self) -> int:
        """The numbers that the tables of `folded` have for each token id."""
        raise NotImplementedError

    def zeros(self, name: str, entries: int) -> Tensor:
        """Return an array of a state of zeros, by its name, with this number of rows or slots: `hidden` or `cell`, float32."""
        return torch.zeros(
            entries, self.vector if name == "hidden" else self.hidden, dtype=torch.float32, device=self.array.device
        )

    @cached_property
    def place(self) -> tuple[torch.device, torch.dtype, int, tuple[str, ...], int]:
        """What decides the backend of this layer: device, storage, hidden, variants and vector, as in `kernels.backend.Problem`."""
        return self.array.device, self.array.dtype, self.hidden, self.variants, self.vector

    @cached_property
    def form(self) -> dict[str, Any]:
        """The properties that both directions of a layer must share."""
        return form_of(self)

    @cached_property
    def packed(self) -> dict[Any, Any]:
        """The weights in the layouts that kernels read, by layout; each is made once and kept."""
        return {}


RunKernel = Callable[..., Encoded]
"""The function of a backend: from (x, weights, state, *, want) to Encoded."""


class RowState(Protocol):
    """The state of the rows of a batch, of any family: a dataclass of its arrays, slots and sources.

    Without slots, every array has one entry for each row, and the state after the batch is in new arrays.

    With slots, every array is a state cache with one entry for each slot. Row r starts from the state in slot sources[r], and its state
    after the batch is written to slot slots[r]. Without sources, row r starts from slot slots[r]. The state after a batch never has
    sources. Both arrays are (rows,), int32 or int64. No row may start from a slot that another row writes, and with sources from no slot
    that any row writes. Several rows may start from one slot. Several rows may write one slot, which then holds a mixture of their values.
    """

    __slots__ = ()

    @property
    def slots(self) -> Tensor | None: ...
    @property
    def sources(self) -> Tensor | None: ...

    def by_row(self) -> Self:
        """Return the state without slots: a copy of the slots that the rows start from, or itself if it has no slots."""
        slots = source_slots(self)
        return self if slots is None else type(self)(*(getattr(self, name)[slots] for name in state_arrays(self)))


State = TypeVar("State", bound=RowState)


def source_slots(state: RowState) -> Tensor | None:
    """Return the slots that the rows start from, (rows,) int64, or None for a state without slots."""
    slots = state.slots if state.sources is None else state.sources
    return None if slots is None else slots.long()


def without_sources(state: State) -> State:
    """Return the state after a batch: the next chunk of each row starts from the slot that this batch wrote."""
    return state if state.sources is None else replace(state, sources=None)  # type: ignore[type-var]  # every state is a dataclass


def with_state_slots(run: RunKernel) -> RunKernel:
    """Add state slots to a backend without them: gather each row's state before it runs, and scatter it to the slots afterwards."""

    def run_with_state_slots(x: Ragged, weights: Any, state: Any, *, want: Outputs) -> Encoded:
        if state is None or state.slots is None:
            return run(x, weights, state, want=want)
        encoded = run(x, weights, state.by_row(), want=want)
        _scatter(encoded.state, state)
        return replace(encoded, state=without_sources(state))

    return run_with_state_slots


def state_arrays(state: Any) -> list[str]:
    """Return the names of the arrays of a state."""
    return [field.name for field in fields(state) if field.name not in ("slots", "sources")]


def _scatter(by_row: Any, state: Any) -> None:
    """Write the state of each row into its slot of every state cache."""
    slots = state.slots.long()
    for name in state_arrays(state):
        cache = getattr(state, name)
        cache.index_copy_(0, slots, getattr(by_row, name).to(cache.dtype))


def start_offsets(sizes: Sizes) -> Sizes:
    """Return where each part starts when parts of these sizes are packed end to end: the sum of the sizes before it."""
    before: Sizes = sizes.cumsum() - sizes
    return before


def count_windows(steps: Sizes, reach: int, stride: int) -> Sizes:
    """Return how many windows of `reach` steps, `stride` apart, fit into each number of steps."""
    windows: Sizes = np.maximum((steps - reach) // stride + 1, 0)
    return windows


def reversal_index(offsets: Tensor, tokens: int) -> Tensor:
    """Return the index, (tokens,), that reverses every row. Entries after the last row are undefined. Does not wait for the device."""
    # As few operations as possible, because each is a launch. searchsorted receives the token's number plus one: the first end at or after
    # it belongs to the token's row, and rows without steps are skipped.
    beyond = torch.arange(1, tokens + 1, device=offsets.device, dtype=offsets.dtype)
    row = torch.searchsorted(offsets[1:], beyond)
    both_ends = offsets + offsets.roll(-1)
    return both_ends[row].sub_(beyond).clamp_(min=0)


def check_data(x: Ragged, columns: int | None) -> None:
    """Raises ContractError unless x is a batch of vectors with this number of columns, or of token ids if it is None."""
    if columns is not None:
        check_shape("x.data", x.data, (None, columns))
    else:
        check_shape("x.data", x.data, (None,))
        if x.data.dtype not in (torch.int32, torch.int64):
            raise ContractError(f"x.data is {x.data.dtype}, expected ids: torch.int32 or torch.int64")
    check_ragged(x)


def check_ragged(x: Ragged) -> None:
    """Raises ContractError unless x is a batch. On a GPU the offsets' values are trusted: reading them would wait for the device."""
    check_shape("x.offsets", x.offsets, (None,))
    if not x.offsets.is_cpu:
        return
    offsets = x.offsets.tolist()
    tokens = x.data.shape[0]
    if not offsets or offsets[0] != 0 or offsets[-1] != tokens or offsets != sorted(offsets):
        raise ContractError(f"x.offsets must rise from 0 to the {tokens} tokens and never fall; they begin with {offsets[:8]}")


def check_absent(weights: Any, names: Sequence[str], reason: str) -> None:
    """Raises ContractError if any of these fields of the weights has a value."""
    for name in names:
        if getattr(weights, name) is not None:
            raise ContractError(f"weights.{name} must be None because {reason}")


def check_both_directions(
    check: Callable[[Ragged, Any, Any], None], x: Ragged, weights: tuple[Any, Any], states: tuple[Any, Any] | None
) -> None:
    """Raises ContractError unless `check` accepts each direction, forward first, and both have the same form."""
    for direction, state in zip(weights, states or (None, None), strict=True):
        check(x, direction, state)
    forward, backward = (direction.form for direction in weights)
    if forward != backward:
        name = next(name for name in forward if forward[name] != backward[name])
        raise ContractError(f"weights.{name} is {forward[name]} forward and {backward[name]} backward, expected the same")


def check_levels(
    check: Callable[[Ragged, Any, Any], None], x: Ragged, weights: Sequence[Any], states: Sequence[Any] | None
) -> None:
    """Raises ContractError unless `check` accepts each level with its state, and each level above the first takes the outputs of the level
    below."""
    below = x
    for number, (layer, state) in enumerate(zip(weights, states or [None] * len(weights), strict=True)):
        if number and layer.input is None:
            raise ContractError(
                f"weights[{number}].input is None, expected a matrix: only the first level takes ids or gate inputs"
            )
        check(below, layer, state)
        below = Ragged(x.data.new_empty(1).expand(x.data.shape[0], layer.vector), x.offsets)


def form_of(weights: Any) -> dict[str, Any]:
    """Return the shape and dtype of every array of the weights, and the value of every other field."""
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return {name: (*value.shape, value.dtype) if isinstance(value, Tensor) else value for name, value in values.items()}


def state_entries(x: Ragged, state: RowState, name: str = "state") -> int | None:
    """Return how many entries the arrays of a state must have: as many as rows, or None (any number) with slots."""
    if state.slots is None:
        if state.sources is not None:
            raise ContractError(f"{name}.sources requires {name}.slots: pass both, or neither")
        return x.rows
    check_shape(f"{name}.slots", state.slots, (x.rows,))
    if state.sources is not None:
        check_shape(f"{name}.sources", state.sources, (x.rows,))
    return None


def check_shape(name: str, array: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raises ContractError unless `array` has this shape. None stands for any size."""
    actual = array.shape
    if actual == shape:
        return
    matches = len(actual) == len(shape) and (
        (actual[1:] == shape[1:] and shape[0] is None)
        or all(expected in (None, size) for expected, size in zip(shape, actual, strict=True))
    )
    if not matches:
        sizes = [*actual, *("any" for _ in shape)]
        expected_shape = tuple(size if expected is None else expected for expected, size in zip(shape, sizes, strict=False))
        raise ContractError(f"{name} has the shape {tuple(actual)}, expected {expected_shape}")
