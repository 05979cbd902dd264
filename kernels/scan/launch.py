"""The launch of a scan kernel: product.cu and tile_product.cu compute a layer from its inputs, gate_inputs.cu and tile_gates.cu from gate
inputs or tables.

All run both directions in one launch. Sums and cells are float32. Nothing waits for the device. A call may be captured in a CUDA graph:
offsets, ids, slots and values are read when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.backend import Problem
from kernels.compile import Kernel, load_kernel
from kernels.launching import (
    address,
    as_int32,
    ceil_div,
    check_state_cache,
    device_index,
    device_refusal,
    multiprocessors,
    on_device,
    pack_once,
    row_sources,
)
from kernels.ragged import ContractError, Encoded, Outputs, Ragged, RunKernel
from kernels.scan.forms import ScanForm
from kernels.scan.gate_inputs import gate_inputs_constants
from kernels.scan.layer import Direction, GateSource, ScanVariant
from kernels.scan.product import input_map, pack, product_constants
from kernels.scan.shape import HERE, PART, TILE, ScanShape, TileShape, multiplies_inputs, needs_every_step, shape_for
from kernels.scan.tile_gates import tile_gates_constants
from kernels.scan.tile_product import tile_product_constants

MAX_TOKENS = 2**31 - 2**16
"""Tokens of one call, because the kernels count positions in 32 bits."""
MAX_CACHED_LAUNCHES = 4096
FOLD_THREADS = 32
"""Hidden units of a block of fold.cu."""


@dataclass(frozen=True, slots=True)
class ScanLaunch:
    """A kernel and its grid. slices: parts of the hidden units, one per block; streams: parts of the rows, one per team."""

    kernel: Kernel
    blocks: tuple[int, int, int]
    shared: int
    streams: int
    slices: int


def refuses(problem: Problem) -> str | None:
    """Return why the kernels cannot run a problem, or None."""
    return device_refusal(problem, (8, 0))


def describe(problem: Problem) -> str:
    """Return what computes the product of the inputs of a layer in 16 bits."""
    if problem.storage != torch.float32 and multiplies_inputs(device_index(problem.device)):
        return "with the product of its inputs"
    return "after a library product"


def encode(
    form: ScanForm,
    gates: GateSource,
    x: Ragged,
    directions: Sequence[Direction],
    want: Outputs,
    *,
    hidden: int,
    storage: torch.dtype,
    ids: Tensor | None = None,
    skip: Tensor | None = None,
) -> tuple[Encoded, list[Tensor]]:
    """Encode every row in one launch, or two if the parts of rows are computed apart.

    Returns the outputs, without a state, and the new cells of each direction.
    """
    device, rows, tokens, width = x.offsets.device, x.rows, len(x.data), hidden * len(directions)
    if tokens > MAX_TOKENS:
        raise ContractError(f"x has {tokens} tokens, but one call takes at most {MAX_TOKENS}: split the batch")

    def new(requested: bool, count: int) -> Tensor | None:
        return torch.empty((count, width), dtype=torch.float32, device=device) if requested else None

    encoded = Encoded(None, new(want.steps, tokens), new(want.last, rows), new(want.mean, rows), new(want.max, rows))
    after = [_new_cells(direction, rows, hidden, device) for direction in directions]
    if not rows:
        return encoded, after
    data = directions[0].data
    variant = ScanVariant(
        device_index(device),
        storage,
        form,
        gates,
        len(directions),
        hidden,
        inputs=0 if data is None else data.shape[1],
        skip_float32=skip is not None and skip.dtype == torch.float32,
        all_steps=needs_every_step(want),
    )
    shape = shape_for(variant, rows, tokens)
    launch = _launch(variant, shape, rows, tokens if isinstance(shape, TileShape) or shape.split else 0)
    # An early launch reads its weights before it waits for earlier kernels, so no earlier kernel may still be packing them.
    early = all(_is_packed(direction, shape.units) for direction in directions)
    arrays = _direction_arrays(variant, shape.units, directions, after)
    parts = tokens // PART + rows if shape.split else 0
    maps, rests = (_pairs(variant, count, device) if count else [None] for count in (parts, rows if parts else 0))
    single = (x.offsets.contiguous(), ids, skip, encoded.steps, encoded.last, encoded.mean, encoded.max)
    sizes = (
        single[0].dtype == torch.int64,
        ids is not None and ids.dtype == torch.int64,
        rows,
        hidden,
        width,
        variant.inputs,
        arrays.source[0].shape[-2] if gates.gather else 0,
        0 if skip is None else skip.stride(0),
        launch.streams,
        launch.slices,
        parts,
    )
    skips = [direction.skip_from for direction in directions], [_bits(direction.scale) for direction in directions]
    pairs = [*([address(array) for array in pair] for pair in arrays), *skips]
    last_pairs = [[address(array) for array in pair] for pair in (maps, rests)]
    members = [*_both(pairs), *map(address, single), *_both(last_pairs), *sizes]
    tensor_maps = [input_map(directions[0].data) + input_map(directions[-1].data)] if gates.product else []
    with on_device(device):
        launch.kernel.launch(launch.blocks, launch.shared, members, *tensor_maps, early=early)
        if parts:
            fold = _fold_kernel(variant)
            fold.launch((ceil_div(hidden, FOLD_THREADS), rows, len(directions)), 0, members, early=True)
    return encoded, after


def backend_functions(encode_directions: Callable[..., Encoded]) -> tuple[RunKernel, RunKernel]:
    """Return the functions of a backend for one direction and for both.

    encode_directions: from (x, weights, states, want), with weights and a state or None for each direction, to the outputs and a state for
    each direction.
    """

    def run(x: Ragged, weights: Any, state: Any, *, want: Outputs) -> Encoded:
        encoded = encode_directions(x, (weights,), (state,), want)
        return replace(encoded, state=encoded.state[0])

    def run_both(x: Ragged, weights: tuple[Any, Any], states: tuple[Any, Any] | None, *, want: Outputs) -> Encoded:
        return encode_directions(x, weights, states or (None, None), want)

    return run, run_both


class _DirectionArrays(NamedTuple):
    """The arrays of each direction in the order of struct Call in scan.cuh. They must stay alive until the launch."""

    data: Sequence[Tensor | None]
    source: Sequence[Tensor]
    bias: Sequence[Tensor]
    own_cell: Sequence[Tensor | None]
    left: Sequence[Tensor | None]
    left_after: Sequence[Tensor | None]
    before: Sequence[Tensor | None]
    after: Sequence[Tensor]
    slots_before: Sequence[Tensor | None]
    slots_after: Sequence[Tensor | None]


def _both(pairs: Sequence[Sequence[int]]) -> list[int]:
    """Return the members of pairs in order. With one direction, both are the same."""
    return [number for pair in pairs for number in (pair[0], pair[-1])]


def _pairs(variant: ScanVariant, count: int, device: torch.device) -> Sequence[Tensor]:
    """Return memory for two numbers of every hidden unit, `count` times, for each direction: see fold.cu."""
    return list(torch.empty((variant.directions, count, variant.hidden, 2), dtype=torch.float32, device=device))


def _direction_arrays(
    variant: ScanVariant, units: int, directions: Sequence[Direction], after: Sequence[Tensor]
) -> _DirectionArrays:
    slots = [None if direction.slots is None else as_int32(direction.slots) for direction in directions]
    pairs = list(zip(directions, slots, strict=True))
    return _DirectionArrays(
        data=[direction.data for direction in directions],
        source=[_source(direction, variant, units) for direction in directions],
        bias=[direction.bias for direction in directions],
        own_cell=[direction.own_cell for direction in directions],
        left=[direction.left for direction in directions],
        left_after=[direction.left_after for direction in directions],
        before=[_cells_before(direction) for direction in directions],
        after=after,
        slots_before=[row_sources(own_slots, direction.sources) for direction, own_slots in pairs],
        slots_after=slots,
    )


@lru_cache(MAX_CACHED_LAUNCHES)
def _launch(variant: ScanVariant, shape: ScanShape | TileShape, rows: int, tokens: int) -> ScanLaunch:
    """Return the kernel and its grid. tokens: of shapes that divide rows, or 0."""
    kernel, shared = _kernel(variant, shape)
    slices = ceil_div(variant.hidden, shape.units)
    if isinstance(shape, TileShape):
        spans = max(1, ceil_div(tokens, shape.tiles * TILE))
        return ScanLaunch(kernel, (spans, slices, variant.directions), shared, spans, slices)
    # A block is alone on its multiprocessor. Its two teams are two streams.
    room = 2 * max(1, multiprocessors(variant.device) // (slices * variant.directions))
    streams = min(ceil_div(tokens, PART) if shape.split else rows, room)
    return ScanLaunch(kernel, (ceil_div(streams, 2), slices, variant.directions), shared, streams, slices)


@cache
def _kernel(variant: ScanVariant, shape: ScanShape | TileShape) -> tuple[Kernel, int]:
    """Return the kernel and the bytes of shared memory of a block."""
    gates = variant.gates
    constants = {**_layer_constants(variant), "UNITS": shape.units}
    if isinstance(shape, TileShape) and gates.product:
        source = "tile_product.cu"
        constants |= tile_product_constants(variant, shape)
    elif isinstance(shape, TileShape):
        source = "tile_gates.cu"
        constants |= tile_gates_constants(variant, shape)
    else:
        source = "product.cu" if gates.product else "gate_inputs.cu"
        constants |= (product_constants if gates.product else gate_inputs_constants)(variant, shape)
    if not constants.get("STAGES", 1):
        raise ContractError(f"this device has no room for a window of {gates.window} steps: choose another backend")
    kernel = load_kernel(
        HERE / source,
        variant.device,
        threads=constants.pop("THREADS"),
        **{name: int(value) for name, value in constants.items()},
    )
    return kernel, constants["SHARED"]


@cache
def _fold_kernel(variant: ScanVariant) -> Kernel:
    constants = _layer_constants(variant)
    exact = int(variant.storage == torch.float32)
    return load_kernel(HERE / "fold.cu", variant.device, threads=FOLD_THREADS, EXACT=exact, **constants)


def _layer_constants(variant: ScanVariant) -> dict[str, int]:
    """Return the constants of every kernel, which depend on the layer alone."""
    return {
        **{name.upper(): int(value) for name, value in variant.form._asdict().items()},
        "BFLOAT16": int(variant.storage == torch.bfloat16),
        "SKIP_FLOAT32": int(variant.skip_float32),
    }


def _new_cells(direction: Direction, rows: int, hidden: int, device: torch.device) -> Tensor:
    """Return where the new cells are written; raises ContractError for a state cache that a kernel cannot write."""
    if direction.slots is None or direction.before is None:
        return torch.empty((rows, hidden), dtype=torch.float32, device=device)
    check_state_cache("cell", direction.before)
    return direction.before


def _cells_before(direction: Direction) -> Tensor | None:
    """Return the cells that the rows start from, or the state cache that has them."""
    if direction.before is None or direction.slots is not None:
        return direction.before
    return direction.before.float().contiguous()


def _source(direction: Direction, variant: ScanVariant, units: int) -> Tensor:
    """Return the gate inputs, the tables or the packed weights of a direction."""
    weights, window, blocks = direction.weights, variant.gates.window, variant.form.blocks
    if direction.source is not None:
        return direction.source
    assert weights is not None
    return pack_once(
        direction.packed, _packing(units), lambda: pack(weights.view(window, -1, weights.shape[-1]), blocks, units)
    )


def _is_packed(direction: Direction, units: int) -> bool:
    return direction.weights is None or _packing(units) in direction.packed


def _packing(units: int) -> tuple[str, int]:
    return "input", units


def _bits(value: float) -> int:
    """Return the bits of a float64 as an integer."""
    bits: int = Struct("q").unpack(Struct("d").pack(value))[0]
    return bits
