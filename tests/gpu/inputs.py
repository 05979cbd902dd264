"""Arguments on a GPU, launch shapes and graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.conv import product as conv_launch
from kernels.conv.plan import ConvTile as ConvTile
from kernels.persistent import choice
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.scan import launch as scan_launch
from kernels.scan.shape import ScanShape, TileShape
from tests.kernels import inputs
from tests.kernels.devices import fresh_shape_caches
from tests.kernels.families import Form
from tests.kernels.inputs import Arguments, map_arrays

HALF, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32
HALVES = (HALF, BFLOAT16)
TOLERANCE = {FLOAT32: 2e-5, HALF: 1e-2, BFLOAT16: 6e-2}
SUMS = 2e-3
"""A larger error is not the rounding of float32 sums and of tanh, which is accurate to eleven bits in 16-bit layers."""
STEPS, LAST, MAXIMUM = Outputs(steps=True), Outputs(last=True), Outputs(max=True)
RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
Shape = ScanShape | TileShape | ConvTile | Mapping[str, int] | None
"""Of every launch, instead of the tuned one. A mapping: the size of a persistent kernel by its name in the files of tuned shapes, or the
rows of a tile of several levels, of which as many run at once as the device has room for."""


def stored(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """Return the arguments with data of this dtype, unless the data are ids."""
    data = arguments.x.data
    return arguments._replace(x=Ragged(data.to(dtype) if data.is_floating_point() else data, arguments.x.offsets))


def made(
    form: Form, lengths: Sequence[int], hidden: int, width: int = 24, *, storage: torch.dtype = HALF, seed: int = 0
) -> Arguments:
    """Return arguments on the GPU, the data in the dtype of the weights. The state of a convolution has it too: it consists of inputs."""
    arguments = stored(form.arguments(lengths, hidden, width, storage=storage, seed=seed), storage)
    if form.family == "conv":
        arguments = arguments._replace(state=map_arrays(arguments.state, lambda array: array.to(storage)))
    return arguments.map_arrays(Tensor.cuda)


def gates(form: Form, lengths: Sequence[int], hidden: int, *, storage: torch.dtype = HALF, seed: int = 0) -> Arguments:
    """Return arguments on the GPU with gate inputs, so that no library product precedes the recurrence: its rounding depends on the
    batch."""
    x, weights, state = form.gated(form.arguments(lengths, hidden, 24, seed=seed))
    problem = Arguments(x, map_arrays(weights, lambda array: array.to(storage)), state)
    return stored(problem, storage).map_arrays(Tensor.cuda)


def exactly(form: Form, lengths: Sequence[int], hidden: int, *, storage: torch.dtype = HALF, seed: int = 0) -> Arguments:
    """Return arguments of a layer that has the same bits in any batch."""
    make = gates if form.takes_gates and not form.takes_ids else made
    return make(form, lengths, hidden, storage=storage, seed=seed)


def joined(rows: Sequence[Tensor]) -> Ragged:
    """Return rows packed end to end on the GPU."""
    x = inputs.joined(rows)
    return Ragged(x.data, x.offsets.cuda())


def begun_later(array: Tensor, places: int) -> Tensor:
    """Return the same values, `places` values after an aligned address."""
    return torch.cat([array.new_zeros(places), array.flatten()])[places:].view_as(array)


def random_lengths(rows: int, longest: int) -> list[int]:
    chance = random.Random(rows)
    return [chance.randint(0, longest) for _ in range(rows)]


@contextmanager
def in_shape(shape: Shape) -> Iterator[None]:
    """Launch every layer in this shape."""
    if shape is None:
        yield
    elif isinstance(shape, Mapping):
        tuned = choice._tuned
        if "levels" in shape or shape.keys() & choice.STEP.keys():
            tiles = {"levels": [{"tile": shape["levels"]}]} if "levels" in shape else {"tiles of a step": [shape]}
            changed: Any = patch.object(choice, "_tuned", lambda variant: {**tuned(variant), **tiles})
        else:
            changed = patch.object(choice, "_tuned_shapes", lambda _: [shape])
        with changed, fresh_shape_caches():
            yield
    else:
        module = conv_launch if isinstance(shape, ConvTile) else scan_launch
        with patch.object(module, "shape_for", lambda *_: shape):
            yield


@contextmanager
def tf32_products() -> Iterator[None]:
    """Allow TF32 in the products of float32 layers."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def captured(launch: Callable[[], Encoded]) -> tuple[Callable[[], None], Encoded]:
    """Return a function that replays the launches as a CUDA graph, and the outputs that it fills."""
    launch()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        encoded = launch()
    return graph.replay, encoded
