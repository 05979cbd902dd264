"""Arguments on a GPU, launch shapes, and comparisons of outputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.conv import product as conv_launch
from kernels.conv.plan import TileShape as ConvTile
from kernels.persistent import launch as persistent
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.scan import launch as scan_launch
from kernels.scan.shape import ScanShape, TileShape
from tests.kernels import inputs
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, OUTPUTS, Arguments, arrays, map_arrays
from tests.kernels.shapes import fresh_shape_caches

HALF, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32
HALVES = (HALF, BFLOAT16)
TOLERANCE = {FLOAT32: 2e-5, HALF: 1e-2, BFLOAT16: 6e-2}
SUMS = 2e-3
"""A larger error is not the rounding of float32 sums and of tanh, which is accurate to eleven bits in 16-bit layers."""
STEPS, LAST, MAXIMUM = Outputs(steps=True), Outputs(last=True), Outputs(max=True)
RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
Shape = ScanShape | TileShape | ConvTile | Mapping[str, int] | None
"""Of every launch, instead of the tuned one. A mapping: the size of a persistent kernel by its name in the files of tuned shapes."""


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
        with patch.object(persistent, "_tuned_shapes", lambda _: [shape]), fresh_shape_caches():
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


def outputs(encoded: Encoded) -> dict[str, Tensor]:
    """Return all outputs by name, including the arrays of the state, or of several states, and the scores of a text CNN."""
    requested = {name: array for name in (*OUTPUTS, "scores") if (array := getattr(encoded, name)) is not None}
    if not isinstance(encoded.state, tuple):
        return requested | arrays(encoded.state)
    states = enumerate(encoded.state)
    return requested | {f"{name} {number}": array for number, state in states for name, array in arrays(state).items()}


def agree(actual: Encoded, expected: Encoded, tolerance: float) -> None:
    """Assert that the outputs are close, and the offsets equal. `expected` may have more outputs."""
    for name, array in outputs(actual).items():
        close(array, outputs(expected)[name], tolerance, name)
    assert (actual.offsets is None) == (expected.offsets is None)
    if actual.offsets is not None and expected.offsets is not None:
        assert actual.offsets.tolist() == expected.offsets.tolist()


def close(actual: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """Assert that two arrays are close, whatever their devices and dtypes are."""
    torch.testing.assert_close(
        actual.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=2 * tolerance, msg=lambda text: f"{name}: {text}"
    )


def same(actual: Encoded, expected: Encoded) -> None:
    """Assert that the outputs and the state are bit-equal. `expected` may have more outputs."""
    differing = [name for name, array in outputs(actual).items() if not torch.equal(array, outputs(expected)[name])]
    assert not differing


def same_outputs(actual: Encoded, expected: Encoded) -> None:
    """Assert that the outputs are bit-equal, whatever places the states have."""
    assert [name for name in OUTPUTS if getattr(actual, name) is not None] == [
        name for name in OUTPUTS if getattr(expected, name) is not None
    ]
    for name in (*OUTPUTS, "scores"):
        array, expected_array = getattr(actual, name), getattr(expected, name)
        assert array is None or torch.equal(array, expected_array), name


def same_state(actual: Any, expected: Any) -> None:
    """Assert equal states. A state cache may have a wider dtype."""
    for name, array in arrays(expected).items():
        assert torch.equal(getattr(actual, name).to(array.dtype), array), name


def assert_any_rows_match(run: Callable[..., Encoded], form: Form, arguments: Arguments, tolerance: float) -> None:
    """Compare up to 40 random rows with the reference."""
    x, weights, state = arguments
    encoded = outputs(run(x, weights, state, want=EVERYTHING))
    some = sorted(random.Random(x.rows).sample(range(x.rows), min(x.rows, 40)))
    each = inputs.rows(x)
    sampled = Arguments(joined([each[row] for row in some]), weights, map_arrays(state, itemgetter(some)))
    expected = outputs(exact(form, sampled))
    for name in encoded.keys() - {"steps"}:
        close(encoded[name][some], expected[name], tolerance, name)


def exact(form: Form, arguments: Arguments) -> Encoded:
    """Return the reference's encoding in float64. That of a convolution takes less time on a CPU, and that of a large layer on the GPU."""
    return form.exact(arguments.map_arrays(Tensor.cpu) if form.family == "conv" else arguments)
