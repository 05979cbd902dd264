"""The LSTM's fused backends: `cluster` (cluster.cu), `grid` (grid.cu), and `persistent`, the faster of both.

Both kernels hold their recurrent weights in registers and shared memory for all steps, in float16 or bfloat16; sums and cells are
float32. Nothing waits for the device. A call may be captured in a CUDA graph: offsets, slots and values are read when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels.backend import Problem
from kernels.launching import (
    Capability,
    address,
    as_gate_dtype,
    as_int32,
    check_state_cache,
    device_index,
    device_refusal,
    on_device,
    pack_once,
    row_sources,
)
from kernels.lstm.cluster import ClusterShape
from kernels.lstm.grid import GridShape
from kernels.lstm.packing import HERE, LSTMLaunch, LSTMVariant, pack
from kernels.lstm.types import LSTMState, LSTMWeights
from kernels.ragged import ContractError, Encoded, Outputs, Ragged, without_sources
from kernels.tuning import load_tuned, matching_shapes

PersistentShape = ClusterShape | GridShape
FindShape = Callable[[LSTMVariant, int], PersistentShape | None]
"""Returns the shape for a variant and a number of rows. Whether there is one depends on the variant alone."""
CLUSTER: Mapping[str, type[ClusterShape]] = {"blocks": ClusterShape}
GRID: Mapping[str, type[GridShape]] = {"units": GridShape}
"""Shapes by the name of their size in the files of `tuned`."""


@dataclass(frozen=True, slots=True)
class LSTMPlan:
    """How a call runs. packing: groups and chunks of `pack`; launches: each with its first row and the row after its last."""

    packing: tuple[int, int]
    copies_state: bool
    launches: tuple[tuple[int, int, LSTMLaunch], ...]


def refuses_persistent(problem: Problem) -> str | None:
    """Return why neither kernel can run a problem, or None."""
    no_room = f"this device has no room for {problem.hidden} hidden units"
    return _device_refusal(problem, (8, 0)) or _room_refusal(problem, fastest_shape, no_room)


def refuses_cluster(problem: Problem) -> str | None:
    """Return why the cluster kernel cannot run a problem, or None."""
    no_room = f"no cluster of this device has room for {problem.hidden} hidden units"
    return _device_refusal(problem, (9, 0)) or _room_refusal(problem, cluster_shape, no_room)


def refuses_grid(problem: Problem) -> str | None:
    """Return why the grid kernel cannot run a problem, or None."""
    no_room = f"this device has no room for {problem.hidden} hidden units"
    return _device_refusal(problem, (8, 0)) or _room_refusal(problem, grid_shape, no_room)


def describe_persistent(problem: Problem) -> str:
    """Return which kernel runs for which numbers of rows."""
    variant = _variant(problem)
    bounds = sorted({shape["rows"] for shape in _tuned_shapes(variant.device) if "rows" in shape})
    shapes = [(fastest_shape(variant, rows), f" up to {rows} rows") for rows in bounds] + [
        (fastest_shape(variant, 1 << 30), "")
    ]
    changes = [(shape, bound) for n, (shape, bound) in enumerate(shapes) if n + 1 == len(shapes) or shape != shapes[n + 1][0]]
    return ", ".join(f"{shape}{bound}" for shape, bound in changes)


def persistent(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Encode every row with the faster of both kernels. Shapes as in `kernels.lstm.types`."""
    return _encode(x, weights, state, want, fastest_shape)


def cluster(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Encode every row with the cluster kernel. Shapes as in `kernels.lstm.types`."""
    return _encode(x, weights, state, want, cluster_shape)


def grid(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Encode every row with the grid kernel. Shapes as in `kernels.lstm.types`."""
    return _encode(x, weights, state, want, grid_shape)


@cache
def fastest_shape(variant: LSTMVariant, rows: int) -> PersistentShape | None:
    """Return the fastest shape of both kernels that runs on the device."""
    return _first_shape(variant, rows, {**CLUSTER, **GRID})


@cache
def cluster_shape(variant: LSTMVariant, rows: int) -> PersistentShape | None:
    """Return the fastest shape of the cluster kernel that runs on the device."""
    return _first_shape(variant, rows, CLUSTER)


@cache
def grid_shape(variant: LSTMVariant, rows: int) -> PersistentShape | None:
    """Return the fastest shape of the grid kernel that runs on the device."""
    return _first_shape(variant, rows, GRID)


def _first_shape(
    variant: LSTMVariant, rows: int, kinds: Mapping[str, type[ClusterShape] | type[GridShape]]
) -> PersistentShape | None:
    sizes = matching_shapes(_tuned_shapes(variant.device), tuple(kinds), hidden=variant.hidden, rows=rows)
    shapes = (kinds[kind](variant, size) for kind, size in sizes)
    return next((shape for shape in shapes if shape.runs()), None)


def _tuned_shapes(device: int) -> Sequence[Mapping[str, int]]:
    shapes: Sequence[Mapping[str, int]] = load_tuned(HERE / "tuned", torch.cuda.get_device_name(device))["shapes"]
    return shapes


@cache
def _plan(
    find_shape: FindShape, device: torch.device, storage: torch.dtype, gates_float32: bool, hidden: int, rows: int
) -> LSTMPlan:
    """Return the launches of a call: one, unless there are too many rows for it."""
    shape = find_shape(LSTMVariant(device_index(device), storage == torch.bfloat16, gates_float32, hidden), rows)
    if shape is None:
        raise ContractError(f"this device has no room for an LSTM of {hidden} hidden units: choose another backend")
    bounds = [(first, min(rows, first + shape.max_rows)) for first in range(0, rows, shape.max_rows)]
    launches = tuple((first, until, shape.launch(until - first)) for first, until in bounds)
    return LSTMPlan((shape.groups, shape.chunks), shape.copies_state, launches)


def _encode(x: Ragged, weights: LSTMWeights, state: LSTMState | None, want: Outputs, find_shape: FindShape) -> Encoded:
    """Run the input product and then the kernel. Without slots, `last` and the new hidden state share their memory."""
    gates = _gate_inputs(x, weights)
    rows, hidden = x.rows, weights.hidden
    slots = None if state is None or state.slots is None else as_int32(state.slots)
    after = LSTMState(*_new(gates, 2, rows, hidden).unbind()) if state is None or slots is None else _checked_caches(state)
    encoded = Encoded(
        state=after,
        steps=_new(gates, len(gates), hidden) if want.steps else None,
        last=(after.hidden if slots is None else _new(gates, rows, hidden)) if want.last else None,
        mean=_new(gates, rows, hidden) if want.mean else None,
        max=_new(gates, rows, hidden) if want.max else None,
    )
    if not rows:
        return encoded
    plan = _plan(find_shape, gates.device, weights.recurrent.dtype, gates.dtype == torch.float32, hidden, rows)
    packed = pack_once(weights.packed, plan.packing, lambda: pack(weights.recurrent, *plan.packing))
    before = state.by_row() if state is not None and plan.copies_state else state
    hidden_before, cell_before = (None, None) if before is None else map(_as_float32, (before.hidden, before.cell))
    slots_before = None if before is None or before.slots is None else row_sources(slots, before.sources)
    offsets = x.offsets.contiguous()
    read = (gates, packed, offsets, slots_before, slots, hidden_before, cell_before)
    written = (after.hidden, after.cell, encoded.steps, None if slots is None else encoded.last, encoded.mean, encoded.max)
    addresses = [address(array) for array in (*read, *written)]
    with on_device(gates.device):
        for first, until, launch in plan.launches:
            exchange = gates.new_zeros(launch.exchange_words, dtype=torch.int32) if launch.exchange_words else None
            sizes = (offsets.dtype == torch.int64, first, until, hidden, launch.octets, launch.width)
            launch.kernel.launch((launch.blocks, 1, 1), launch.shared, (*addresses, address(exchange), *sizes))
    return encoded


def _gate_inputs(x: Ragged, weights: LSTMWeights) -> Tensor:
    """Return the gate inputs, (tokens, 4 x hidden), in the dtype of the weights or in float32."""
    storage = weights.recurrent.dtype
    if weights.input is None or weights.bias is None:
        gates = as_gate_dtype(x.data, storage)
        return gates if gates.data_ptr() % 4 == 0 else gates.clone()  # the grid kernel reads whole words
    return torch.addmm(weights.bias, x.data if x.data.dtype == storage else x.data.to(storage), weights.input)


def _as_float32(values: Tensor) -> Tensor:
    """Return contiguous float32 values: the array itself for a state cache, which `check_state_cache` has accepted."""
    return values.float().contiguous()


def _checked_caches(state: LSTMState) -> LSTMState:
    """Return the state after the call, in the same state caches; raises ContractError when a kernel cannot write to them."""
    for name, cached in (("hidden", state.hidden), ("cell", state.cell)):
        check_state_cache(name, cached)
    return without_sources(state)


def _new(like: Tensor, *sizes: int) -> Tensor:
    return like.new_empty(sizes, dtype=torch.float32)


def _device_refusal(problem: Problem, needed: Capability) -> str | None:
    return device_refusal(problem, needed, halves=True)


def _room_refusal(problem: Problem, find_shape: FindShape, reason: str) -> str | None:
    return reason if find_shape(_variant(problem), 1) is None else None


def _variant(problem: Problem) -> LSTMVariant:
    return LSTMVariant(
        device_index(problem.device), problem.storage == torch.bfloat16, gates_float32=False, hidden=problem.hidden
    )
