"""The choice of a kernel, of its launch shape and of its launches for a layer, and the reasons why a kernel refuses a layer.

The order of the shapes was measured on a device and is in `tuned`. This module launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kernels.backend import Problem
from kernels.gated import PEEPHOLES, PROJECTION, RESET_BEFORE
from kernels.launching import PIECE, Capability, ceil_div, device_index, device_refusal
from kernels.persistent.cluster import ClusterShape
from kernels.persistent.grid import GridShape
from kernels.persistent.packing import HERE, Launch, Packing, Variant, WidePacking
from kernels.persistent.step import StepPacking, StepShape
from kernels.persistent.two_products import TwoProductsCluster, TwoProductsGrid, TwoProductsPacking
from kernels.persistent.wide import WideShape
from kernels.ragged import ContractError
from kernels.tuning import load_tuned, matching_shapes

PersistentShape = ClusterShape | GridShape | WideShape | StepShape | TwoProductsCluster | TwoProductsGrid
FindShape = Callable[[Variant, int, int, int], PersistentShape | None]
"""Returns the shape for a variant, the rows of all directions, the number of directions, and the mean number of steps of a row, rounded up.
Whether there is one depends on the variant alone."""
Launches = Sequence[tuple[tuple[int, ...], int, int, Launch]]
"""Launches with the numbers of their directions or levels, their first row and the row after their last."""
Kinds = Mapping[str, Callable[[Variant, int], PersistentShape]]
"""Classes of shapes, by the name of their size in the files of `tuned`."""
Refuses = Callable[["PersistentCell", Problem], str | None]
CLUSTERS: Capability = (9, 0)
"""The lowest compute capability with clusters, which float32 weights need: the grid has no room for two terms."""
MANY = 1 << 30
"""A number of rows or steps that no bound of a shape admits."""
CLUSTER: Kinds = {"blocks": ClusterShape}
GRID: Kinds = {"units": GridShape}
WIDE: Kinds = {"tile": WideShape}
STEP: Kinds = {"step64": partial(StepShape, rows=64), "step128": partial(StepShape, rows=128)}
PERSISTENT: Kinds = {**CLUSTER, **GRID}
ADAPTIVE: Kinds = {**PERSISTENT, **WIDE}
APART, OTHERS = "apart", "others"
"""The kinds of levels that run in turn, and of batches that other kernels run faster than step.cu."""
TWO_PRODUCTS: Kinds = {"blocks": TwoProductsCluster, "units": TwoProductsGrid}


@dataclass(frozen=True, slots=True)
class PersistentCell:
    """A gated cell as the kernels see it.

    name: of its module; gru: as in `Variant`; state: the class of its states; arrays: the names of their arrays; own: returns
    the parameters of a unit besides matrices, as in cell.cuh, or None.
    """

    name: str
    gru: bool
    state: Callable[..., Any]
    arrays: tuple[str, ...]
    own: Callable[[Any], Tensor | None]

    @property
    def runs(self) -> tuple[str, ...]:
        """The variants that the kernels run."""
        return (RESET_BEFORE,) if self.gru else (PEEPHOLES, PROJECTION)

    def variant(self, problem: Problem, *, gates_float32: bool = False) -> Variant:
        """Return the variant of the kernels that runs a problem."""
        two_products = RESET_BEFORE in problem.variants or PROJECTION in problem.variants
        return Variant(
            device_index(problem.device),
            torch.float16 if problem.tf32 else problem.storage,
            gates_float32 or problem.tf32,
            problem.hidden,
            self.gru,
            peepholes=PEEPHOLES in problem.variants,
            vector=(problem.vector or problem.hidden) if two_products else 0,
        )


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How a call runs. packing: the layout of the weights."""

    packing: Packing | WidePacking | StepPacking | TwoProductsPacking
    copies_state: bool
    launches: Launches


@cache
def adaptive_shape(variant: Variant, rows: int, directions: int, steps: int) -> PersistentShape | None:
    """Return the fastest shape of all kernels that runs on the device."""
    by_step = _shape_by_step(variant, ceil_div(rows, directions), steps)
    shape = by_step or _first_shape(variant, rows, directions, ADAPTIVE)
    return shape if shape is not None or variant.projected else step_shape(variant, rows, directions, steps)


def _finder(kinds: Kinds) -> FindShape:
    """Return a function that finds the fastest shape of some kinds that runs on the device."""

    @cache
    def find_shape(variant: Variant, rows: int, directions: int, steps: int) -> PersistentShape | None:
        return _first_shape(variant, rows, directions, kinds)

    return find_shape


fastest_shape, cluster_shape, grid_shape, wide_shape = map(_finder, (PERSISTENT, CLUSTER, GRID, WIDE))
"""fastest_shape: of the kernels with the same order of sums."""


@cache
def step_shape(variant: Variant, rows: int, directions: int, steps: int) -> PersistentShape | None:
    """Return the fastest shape of the kernel with one product for each step."""
    kind, size = next(matching_shapes(_tuned(variant)["tiles of a step"], tuple(STEP), hidden=variant.hidden, rows=rows))
    shape = STEP[kind](variant, size)
    return shape if shape.runs() else None


@cache
def levels_shape(variant: Variant, rows: int, levels: int) -> WideShape | None:
    """Return the shape in which this many levels run at once, or None if they run faster in turn or the device has no room."""
    sizes = matching_shapes(_tuned(variant)["levels"], (APART, *WIDE), hidden=variant.hidden, rows=rows, levels=levels)
    kind, size = next(sizes, (APART, 0))
    if kind == APART or variant.vector:
        return None
    shape = WideShape(variant, size, levels)
    return shape if shape.runs() else None


KINDS: Mapping[FindShape, Kinds] = {
    adaptive_shape: ADAPTIVE,
    fastest_shape: PERSISTENT,
    cluster_shape: CLUSTER,
    grid_shape: GRID,
    wide_shape: WIDE,
}
"""The kinds of shapes among which each function looks."""


def shape_refusal(
    find_shape: FindShape,
    needed: Capability,
    no_room: str,
    cell: PersistentCell,
    problem: Problem,
    *,
    until: Capability | None = None,
    halves: bool = False,
) -> str | None:
    """Return why a kernel cannot run a problem, or None. The other arguments are as in `device_refusal`."""
    variant = cell.variant(problem)
    needed = CLUSTERS if variant.terms > 1 else needed
    refusal = device_refusal(problem, needed, until=until, halves=(halves or variant.vector > 0) and not problem.tf32)
    if refusal is None and find_shape(variant, 1, 1, 1) is None:
        units = "hidden units in float32" if variant.terms > 1 else "hidden units"
        largest = _most_units(variant, find_shape)
        refusal = f"{no_room} for {problem.hidden} {units}" + (f", at most for {largest}" if largest else "")
    return refusal


def adaptive_refusal(cell: PersistentCell, problem: Problem) -> str | None:
    """Return why no other kernel should be chosen for many rows, for a few steps or for several levels, or None."""
    refusal = device_refusal(problem, (9, 0), until=(10, 0))
    variant = cell.variant(problem)
    together = any(levels_shape(variant, MANY, levels) for levels in range(2, problem.levels + 1)) if refusal is None else False
    if refusal is None and not together:
        shapes = [adaptive_shape(variant, MANY, 1, steps) for steps in (1, MANY)]
        if not any(isinstance(shape, WideShape | StepShape) for shape in shapes):
            refusal = f"no other kernel runs many rows of {problem.hidden} hidden units faster"
    return refusal


def bounded_steps(variant: Variant, find_shape: FindShape, steps: int) -> int:
    """Return a number of steps for which a function finds the same shape, out of few numbers: shapes and plans are kept for each."""
    most = _most_steps(variant)
    return min(steps, most) if find_shape is adaptive_shape else most


@cache
def _most_steps(variant: Variant) -> int:
    """Return a number of steps beyond every bound of a shape."""
    return max(shape["steps"] for shape in _by_step(variant) if "steps" in shape) + 1


def step_refusal(cell: PersistentCell, problem: Problem) -> str | None:
    """Return why the kernel with one product for each step cannot run a problem, or None."""
    refusal = device_refusal(problem, (9, 0), until=(10, 0))
    if refusal is None and step_shape(cell.variant(problem), 1, 1, 1) is None:
        refusal = f"needs a multiple of {PIECE} hidden units, this layer has {problem.hidden}"
    return refusal


def describe(cell: PersistentCell, find_shape: FindShape, problem: Problem) -> str:
    """Return which kernel runs for which numbers of steps and rows."""
    variant = cell.variant(problem)
    prefix = "two products a step: " if variant.vector else ""
    many, one = (prefix + _by_rows(variant, find_shape, steps) for steps in (MANY, 1))
    return many if one == many else f"{many}; a single step: {one}"


def _by_rows(variant: Variant, find_shape: FindShape, steps: int) -> str:
    tuned = [*_tuned_shapes(variant), *_by_step(variant)]
    bounds = sorted({shape["rows"] for shape in tuned if "rows" in shape})
    shapes = [(str(find_shape(variant, rows, 1, steps)), f" up to {rows} rows") for rows in bounds]
    shapes.append((str(find_shape(variant, MANY, 1, steps)), ""))
    changes = [(shape, bound) for n, (shape, bound) in enumerate(shapes) if n + 1 == len(shapes) or shape != shapes[n + 1][0]]
    return ", ".join(f"{shape}{bound}" for shape, bound in changes)


def _shape_by_step(variant: Variant, rows: int, steps: int) -> PersistentShape | None:
    """Return the shape of the kernel with one product for each step where it is the fastest, or None."""
    if variant.projected:
        return None
    kind, _ = next(
        matching_shapes(_by_step(variant), (OTHERS, "step"), hidden=variant.hidden, rows=rows, steps=steps), (OTHERS, 0)
    )
    return None if kind == OTHERS else step_shape(variant, rows, 1, steps)


def _first_shape(variant: Variant, rows: int, directions: int, kinds: Kinds) -> PersistentShape | None:
    shapes = _candidates(variant, rows, directions, kinds)
    fastest = next((shape for shape in shapes if shape.runs()), None)
    if fastest is None or torch.cuda.get_device_name(variant.device) == _tuned(variant)["device"]:
        return fastest
    # The order was measured on another device. Where that has more room, its fastest shape may need many more launches here.
    others = [shape for shape in shapes if type(shape) is type(fastest) and shape.has_room()]
    fewest = min(others, key=lambda shape: _launches(shape, rows, directions))
    return fewest if fewest.runs() else fastest


def _candidates(variant: Variant, rows: int, directions: int, kinds: Kinds) -> list[PersistentShape]:
    """Return the shapes of the file for this device, the fastest first, whether it has room for them or not."""
    if variant.vector:
        kinds = {kind: TWO_PRODUCTS[kind] for kind in kinds if kind in TWO_PRODUCTS}
    sizes = matching_shapes(_tuned_shapes(variant), tuple(kinds), hidden=variant.hidden, rows=rows, directions=directions)
    return [kinds[kind](variant, size) for kind, size in sizes]


def _launches(shape: PersistentShape, rows: int, directions: int) -> int:
    """Return how many launches of a shape run the rows of all directions."""
    together = directions if shape.runs_both else 1
    return directions // together * ceil_div(ceil_div(rows, directions), shape.max_rows(together))


def _most_units(variant: Variant, find_shape: FindShape) -> int:
    """Return the most hidden units that have room by the sizes alone, out of fewer than the variant has; 0 if there are none."""
    smaller = (variant.of_size(hidden) for hidden in range(variant.hidden - 1, 0, -1))
    kinds = KINDS[find_shape]
    return next((other.hidden for other in smaller if any(shape.has_room() for shape in _candidates(other, 1, 1, kinds))), 0)


def _tuned(variant: Variant) -> Mapping[str, Any]:
    return load_tuned(HERE / "tuned", torch.cuda.get_device_name(variant.device))


def _tuned_shapes(variant: Variant) -> Sequence[Mapping[str, int]]:
    name = "float32" if variant.terms > 1 else "gru" if variant.gru else "lstm"
    shapes: Sequence[Mapping[str, int]] = _tuned(variant)[f"{name}, two products" if variant.vector else name]
    return shapes


def _by_step(variant: Variant) -> Sequence[Mapping[str, int]]:
    """Return for which sizes a product for each step is the fastest."""
    name = ", float32" if variant.terms > 1 else ", reset before" if variant.vector else ""
    shapes: Sequence[Mapping[str, int]] = _tuned(variant)[f"one product a step{name}"]
    return shapes


@cache
def launch_plan(name: str, find_shape: FindShape, variant: Variant, directions: int, rows: int, steps: int) -> LaunchPlan:
    """Return the launches of a call: one, unless there are too many rows for it or both directions cannot run at once."""
    shape = find_shape(variant, directions * rows, directions, steps)
    if shape is None:
        raise ContractError(
            f"this kernel does not run {variant.hidden} hidden units of a layer {name!r} here: choose another backend"
        )
    together = directions == 1 or shape.runs_both
    launches: list[tuple[tuple[int, ...], int, int, Launch]] = []
    for sides in (tuple(range(directions)),) if together else ((0,), (1,)):
        most = shape.max_rows(len(sides))
        bounds = [(first, min(rows, first + most)) for first in range(0, rows, most)]
        launches += [(sides, first, until, shape.launch(until - first, len(sides))) for first, until in bounds]
    return LaunchPlan(shape.packing, shape.copies_state, tuple(launches))
