"""Arguments on a GPU, and what comes back compared with the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.contract import Encoded, Ragged
from tests.kernels.families import Form
from tests.kernels.inputs import OUTPUTS, Given, arrays

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
LSTM = Form("lstm")


def on_gpu(given: Given) -> Given:
    return given.mapped(torch.Tensor.cuda)


def stored(given: Given, dtype: torch.dtype) -> Given:
    """With the data in this dtype."""
    return given._replace(x=Ragged(given.x.data.to(dtype), given.x.offsets))


def lstm(lengths: Sequence[int], hidden: int, *, storage: torch.dtype = torch.float16, seed: int = 0) -> Given:
    """On the GPU, the data in the dtype of the weights."""
    return on_gpu(stored(LSTM.given(lengths, hidden, 24, storage=storage, seed=seed), storage))


def gated(lengths: Sequence[int], hidden: int, *, storage: torch.dtype = torch.float16, seed: int = 0) -> Given:
    """With gate inputs, so that no library's product stands before the recurrence."""
    return LSTM.gated(lstm(lengths, hidden, storage=storage, seed=seed))


def outputs(encoded: Encoded) -> dict[str, Tensor]:
    """What came out, the state's arrays included, by name."""
    wanted = {name: array for name in OUTPUTS if (array := getattr(encoded, name)) is not None}
    return wanted | arrays(encoded.state)


def agree(actual: Encoded, expected: Encoded, tolerance: float) -> None:
    for name, array in outputs(actual).items():
        close(array, outputs(expected)[name], tolerance, name)


def close(actual: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """On whichever devices they are."""
    torch.testing.assert_close(
        actual.cpu().double(), expected.cpu(), rtol=tolerance, atol=2 * tolerance, msg=lambda text: f"{name}: {text}"
    )


def same(actual: Encoded, expected: Encoded) -> None:
    differing = [name for name, array in outputs(actual).items() if not torch.equal(array, outputs(expected)[name])]
    assert not differing
