"""The launches of a layer: `cluster` (cluster.cu), `grid` (grid.cu), and `persistent`, the faster of both.

Both kernels hold their recurrent weights in registers and shared memory for all steps, in float16 or bfloat16; sums and cells are
float32. Nothing waits for the device. A call may be captured in a CUDA graph: offsets, slots and values are read when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kernels.backend import Backend, Problem
from kernels.gated import PEEPHOLES, with_table
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
from kernels.persistent.cluster import ClusterShape
from kernels.persistent.grid import GridShape
from kernels.persistent.packing import HERE, Launch, Variant, pack
from kernels.ragged import ContractError, Encoded, Outputs, Ragged, without_sources
from kernels.tuning import load_tuned, matching_shapes

PersistentShape = ClusterShape | GridShape
FindShape = Callable[[Variant, int], PersistentShape | None]
"""Returns the shape for a variant and a number of rows. Whether there is one depends on the variant alone."""
CLUSTER: Mapping[str, type[ClusterShape]] = {"blocks": ClusterShape}
GRID: Mapping[str, type[GridShape]] = {"units": GridShape}
"""Shapes by the name of their size in the files of `tuned`."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family as the kernels see it.

    name: of its module; gru: as in `Variant`; state: the class of its states; arrays: the names of their arrays; own: returns what a unit
    has besides matrices, as in cell.cuh, or None.
    """

    name: str
    gru: bool
    state: Callable[..., Any]
    arrays: tuple[str, ...]
    own: Callable[[Any], Tensor | None]

    @property
    def runs(self) -> tuple[str, ...]:
        """The variants of the family that the kernels run."""
        return () if self.gru else (PEEPHOLES,)

    def variant(self, device: torch.device, storage: torch.dtype, hidden: int, *, gates_float32: bool, own: bool) -> Variant:
        """Return the variant of the kernels. own: whether a unit has something besides matrices."""
        return Variant(
            device_index(device), storage == torch.bfloat16, gates_float32, hidden, self.gru, peepholes=own and not self.gru
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call runs. packing: groups and chunks of `pack`; launches: each with its first row and the row after its last."""

    packing: tuple[int, int]
    copies_state: bool
    launches: tuple[tuple[int, int, Launch], ...]


def backends(family: Family) -> tuple[Backend, ...]:
    """Return the backends `persistent`, `cluster` and `grid` of a family, the fastest first."""
    ways: tuple[tuple[str, FindShape, Capability, str], ...] = (
        ("persistent", fastest_shape, (8, 0), "this device has no room"),
        ("cluster", cluster_shape, (9, 0), "no cluster of this device has room"),
        ("grid", grid_shape, (8, 0), "this device has no room"),
    )
    return tuple(
        Backend(
            name,
            with_table(partial(encode, family, find_shape)),
            partial(_refusal, family, find_shape, needed, no_room),
            partial(_describe, family) if name == "persistent" else None,
            runs=family.runs,
        )
        for name, find_shape, needed, no_room in ways
    )


def encode(family: Family, find_shape: FindShape, x: Ragged, weights: Any, state: Any, *, want: Outputs) -> Encoded:
    """Run the input product and then the kernel. Without slots, `last` and the new hidden state share their memory."""
    gates = _gate_inputs(x, weights)
    rows, hidden = x.rows, weights.hidden
    slots = None if state is None or state.slots is None else as_int32(state.slots)
    after = (
        _checked_caches(family, state)
        if slots is not None
        else family.state(*(_new(gates, rows, hidden) for _ in family.arrays))
    )
    encoded = Encoded(
        state=after,
        steps=_new(gates, len(gates), hidden) if want.steps else None,
        last=(after.hidden if slots is None else _new(gates, rows, hidden)) if want.last else None,
        mean=_new(gates, rows, hidden) if want.mean else None,
        max=_new(gates, rows, hidden) if want.max else None,
    )
    if not rows:
        return encoded
    own = family.own(weights)
    plan = _plan(
        family, find_shape, gates.device, weights.recurrent.dtype, gates.dtype == torch.float32, own is not None, hidden, rows
    )
    packed = pack_once(weights.packed, plan.packing, lambda: pack(weights.recurrent, *plan.packing))
    units = None if own is None else pack_once(weights.packed, "own", lambda: _as_float32(own))
    before = state.by_row() if state is not None and plan.copies_state else state
    hidden_before, cell_before = _arrays(family, before)
    hidden_after, cell_after = _arrays(family, after)
    slots_before = None if before is None or before.slots is None else row_sources(slots, before.sources)
    offsets = x.offsets.contiguous()
    read = (gates, packed, units, offsets, slots_before, slots, hidden_before, cell_before)
    written = (hidden_after, cell_after, encoded.steps, None if slots is None else encoded.last, encoded.mean, encoded.max)
    addresses = [address(array) for array in (*read, *written)]
    with on_device(gates.device):
        for first, until, launch in plan.launches:
            exchange = gates.new_zeros(launch.exchange_words, dtype=torch.int32) if launch.exchange_words else None
            sizes = (offsets.dtype == torch.int64, first, until, hidden, launch.octets, launch.width)
            launch.kernel.launch((launch.blocks, 1, 1), launch.shared, (*addresses, address(exchange), *sizes))
    return encoded


@cache
def fastest_shape(variant: Variant, rows: int) -> PersistentShape | None:
    """Return the fastest shape of both kernels that runs on the device."""
    return _first_shape(variant, rows, {**CLUSTER, **GRID})


@cache
def cluster_shape(variant: Variant, rows: int) -> PersistentShape | None:
    """Return the fastest shape of the cluster kernel that runs on the device."""
    return _first_shape(variant, rows, CLUSTER)


@cache
def grid_shape(variant: Variant, rows: int) -> PersistentShape | None:
    """Return the fastest shape of the grid kernel that runs on the device."""
    return _first_shape(variant, rows, GRID)


def _refusal(family: Family, find_shape: FindShape, needed: Capability, no_room: str, problem: Problem) -> str | None:
    """Return why a kernel cannot run a problem, or None."""
    refusal = device_refusal(problem, needed, halves=True)
    if refusal is None and find_shape(_variant(family, problem), 1) is None:
        refusal = f"{no_room} for {problem.hidden} hidden units"
    return refusal


def _describe(family: Family, problem: Problem) -> str:
    """Return which kernel runs for which numbers of rows."""
    variant = _variant(family, problem)
    bounds = sorted({shape["rows"] for shape in _tuned_shapes(variant) if "rows" in shape})
    shapes = [(fastest_shape(variant, rows), f" up to {rows} rows") for rows in bounds] + [
        (fastest_shape(variant, 1 << 30), "")
    ]
    changes = [(shape, bound) for n, (shape, bound) in enumerate(shapes) if n + 1 == len(shapes) or shape != shapes[n + 1][0]]
    return ", ".join(f"{shape}{bound}" for shape, bound in changes)


def _first_shape(
    variant: Variant, rows: int, kinds: Mapping[str, type[ClusterShape] | type[GridShape]]
) -> PersistentShape | None:
    sizes = matching_shapes(_tuned_shapes(variant), tuple(kinds), hidden=variant.hidden, rows=rows)
    shapes = (kinds[kind](variant, size) for kind, size in sizes)
    return next((shape for shape in shapes if shape.runs()), None)


def _tuned_shapes(variant: Variant) -> Sequence[Mapping[str, int]]:
    tuned = load_tuned(HERE / "tuned", torch.cuda.get_device_name(variant.device))
    shapes: Sequence[Mapping[str, int]] = tuned["gru" if variant.gru else "lstm"]
    return shapes


@cache
def _plan(
    family: Family,
    find_shape: FindShape,
    device: torch.device,
    storage: torch.dtype,
    gates_float32: bool,
    own: bool,
    hidden: int,
    rows: int,
) -> Plan:
    """Return the launches of a call: one, unless there are too many rows for it."""
    shape = find_shape(family.variant(device, storage, hidden, gates_float32=gates_float32, own=own), rows)
    if shape is None:
        raise ContractError(
            f"this device has no room for {hidden} hidden units of the layer {family.name}: choose another backend"
        )
    bounds = [(first, min(rows, first + shape.max_rows)) for first in range(0, rows, shape.max_rows)]
    launches = tuple((first, until, shape.launch(until - first)) for first, until in bounds)
    return Plan((shape.groups, shape.chunks), shape.copies_state, launches)


def _gate_inputs(x: Ragged, weights: Any) -> Tensor:
    """Return the gate inputs, (tokens, 4 or 3 x hidden), in the dtype of the weights or in float32."""
    storage = weights.recurrent.dtype
    if weights.input is None or weights.bias is None:
        gates = as_gate_dtype(x.data, storage)
    else:
        gates = torch.addmm(weights.bias, x.data if x.data.dtype == storage else x.data.to(storage), weights.input)
    # The grid kernel reads whole words of 4 bytes, also the one that the last gate input begins.
    whole = gates.data_ptr() % 4 == 0 and gates.numel() * gates.element_size() % 4 == 0
    return gates if whole else gates.new_empty(gates.numel() + 1)[:-1].view_as(gates).copy_(gates)


def _arrays(family: Family, state: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the hidden states and the cells, as far as there are any."""
    if state is None:
        return None, None
    arrays = [_as_float32(getattr(state, name)) for name in family.arrays]
    return arrays[0], arrays[1] if len(arrays) > 1 else None


def _as_float32(values: Tensor) -> Tensor:
    """Return contiguous float32 values: the array itself for a state cache, which `check_state_cache` has accepted."""
    return values.float().contiguous()


def _checked_caches(family: Family, state: Any) -> Any:
    """Return the state after the call, in the same state caches; raises ContractError when a kernel cannot write to them."""
    for name in family.arrays:
        check_state_cache(name, getattr(state, name))
    return without_sources(state)


def _new(like: Tensor, *sizes: int) -> Tensor:
    return like.new_empty(sizes, dtype=torch.float32)


def _variant(family: Family, problem: Problem) -> Variant:
    own = PEEPHOLES in problem.variants
    return family.variant(problem.device, problem.storage, problem.hidden, gates_float32=False, own=own)
