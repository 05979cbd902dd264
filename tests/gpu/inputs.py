"""Arguments on a GPU, and what comes back compared with the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.contract import Encoded, Ragged
from kernels.scan import launch
from kernels.scan.launch import Shape
from tests.kernels import inputs
from tests.kernels.families import Form
from tests.kernels.inputs import OUTPUTS, Given, arrays, mapped

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
LSTM = Form("lstm")


def on_gpu(given: Given) -> Given:
    return given.mapped(torch.Tensor.cuda)


def stored(given: Given, dtype: torch.dtype) -> Given:
    """With the data in this dtype, unless they are ids."""
    data = given.x.data
    return given._replace(x=Ragged(data.to(dtype) if data.is_floating_point() else data, given.x.offsets))


def made(
    form: Form,
    lengths: Sequence[int],
    hidden: int,
    width: int = 24,
    *,
    storage: torch.dtype = torch.float16,
    seed: int = 0,
) -> Given:
    """On the GPU, the data in the dtype of the weights."""
    return on_gpu(stored(form.given(lengths, hidden, width, storage=storage, seed=seed), storage))


def gates(form: Form, lengths: Sequence[int], hidden: int, *, storage: torch.dtype = torch.float16, seed: int = 0) -> Given:
    """With gate inputs, so that no library's product stands before the recurrence."""
    x, weights, state = form.gated(form.given(lengths, hidden, 24, seed=seed))
    return on_gpu(stored(Given(x, mapped(weights, lambda array: array.to(storage)), state), storage))


def with_wrong_guesses(given: Given) -> Given:
    """Gates of an SRU of which a ring guesses many cells wrong, and is certain of them: of candidates that the next step takes away
    nothing is left but their rounding, which is larger than what is allowed for."""
    x, weights, state = given
    hidden = weights.hidden
    x.data[:, hidden : 2 * hidden] = 3.0
    for step, candidate in ((20, 60000.0), (21, -30000.0)):
        x.data[step::128, :hidden] = candidate  # in every other tile
        x.data[step::128, hidden : 2 * hidden] = 0.0
    return Given(x, replace(weights, bias=torch.zeros_like(weights.bias)), state)


def lstm(lengths: Sequence[int], hidden: int, *, storage: torch.dtype = torch.float16, seed: int = 0) -> Given:
    return made(LSTM, lengths, hidden, storage=storage, seed=seed)


def gated(lengths: Sequence[int], hidden: int, *, storage: torch.dtype = torch.float16, seed: int = 0) -> Given:
    """Of an LSTM."""
    return gates(LSTM, lengths, hidden, storage=storage, seed=seed)


def joined(rows: Sequence[Tensor]) -> Ragged:
    """Rows on the GPU laid end to end."""
    x = inputs.joined(rows)
    return Ragged(x.data, x.offsets.cuda())


@contextmanager
def in_shape(shape: Shape) -> Iterator[None]:
    """Every layer of an SRU or a QRNN is launched in this shape."""
    with patch.object(launch, "shape_for", lambda *_: shape):
        yield


def outputs(encoded: Encoded) -> dict[str, Tensor]:
    """What came out, the arrays of the state or of the pair of states included, by name."""
    wanted = {name: array for name in OUTPUTS if (array := getattr(encoded, name)) is not None}
    if not isinstance(encoded.state, tuple):
        return wanted | arrays(encoded.state)
    ways = zip(("forward", "backward"), encoded.state, strict=True)
    return wanted | {f"{name} {way}": array for way, state in ways for name, array in arrays(state).items()}


def agree(actual: Encoded, expected: Encoded, tolerance: float) -> None:
    for name, array in outputs(actual).items():
        close(array, outputs(expected)[name], tolerance, name)


def close(actual: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """On whichever devices they are, and in whichever dtypes."""
    torch.testing.assert_close(
        actual.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=2 * tolerance, msg=lambda text: f"{name}: {text}"
    )


def same(actual: Encoded, expected: Encoded) -> None:
    differing = [name for name, array in outputs(actual).items() if not torch.equal(array, outputs(expected)[name])]
    assert not differing
