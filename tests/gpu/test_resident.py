"""Tests of the kernel that stays: steps of several streams in any order match the reference, whatever ends it in between."""

from __future__ import annotations

import random
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.persistent import resident
from kernels.persistent.resident import Resident
from kernels.ragged import ContractError, Ragged
from tests.gpu.cases import GRU, GRU_BEFORE, LSTM, ONE_PRODUCT, PEEPHOLES
from tests.gpu.inputs import BFLOAT16, FLOAT32, HALF, HALVES, TOLERANCE, made
from tests.kernels.families import Form
from tests.kernels.inputs import Arguments, arrays, map_arrays

STREAMS, STEPS = 3, 5
Answers = list[NDArray[np.float32]]


class Streams(NamedTuple):
    """Layers with the states of STREAMS streams in two slots each, a matrix of outputs, and inputs, (STREAMS, STEPS, inputs)."""

    form: Form
    layers: list[Arguments]
    output: Tensor
    bias: Tensor
    inputs: Tensor

    @classmethod
    def random(cls, form: Form, storage: torch.dtype, hidden: int, layers: int, inputs: int, outputs: int = 32) -> Streams:
        generator = torch.Generator().manual_seed(hidden)
        widths = [inputs, *[hidden] * (layers - 1)]
        arguments = [made(form, [1] * 2 * STREAMS, hidden, width, storage=storage, seed=n) for n, width in enumerate(widths)]
        sizes = (hidden, outputs), (outputs,), (STREAMS, STEPS, inputs)
        output, bias, data = (torch.randn(size, generator=generator) for size in sizes)
        return cls(form, arguments, (output * hidden**-0.5).to(storage).cuda(), bias.to(storage).cuda(), data.to(storage))

    def states(self) -> list[Any]:
        return [map_arrays(layer.state, Tensor.clone) for layer in self.layers]

    def kernel(self, states: list[Any] | None = None) -> Resident:
        weights = [layer.weights for layer in self.layers]
        return Resident(self.form.module.FUSED, weights, states or self.states(), self.output, self.bias)

    def step(self, kernel: Resident, stream: int, step: int) -> NDArray[np.float32]:
        [vectors] = kernel.vectors(self.inputs[stream, step, None].float())
        return kernel.step(vectors, 2 * stream + step % 2, 2 * stream + 1 - step % 2)

    def answers(self, kernel: Resident, stream: int) -> Answers:
        return [self.step(kernel, stream, step) for step in range(STEPS)]

    def expected(self, stream: int) -> Tensor:
        """Return the outputs of the reference, (STEPS, outputs) float64."""
        x = self.inputs[stream].cuda()
        for layer in self.layers:
            state = map_arrays(layer.state, lambda array: array[2 * stream, None])
            steps = self.form.exact(Arguments(Ragged(x, torch.tensor([0, STEPS]).cuda()), layer.weights, state)).steps
            assert steps is not None
            x = steps
        return x @ self.output.double() + self.bias.double()


@pytest.mark.parametrize("form", ONE_PRODUCT, ids=str)
@pytest.mark.parametrize("storage", HALVES, ids=str)
@pytest.mark.parametrize(
    "hidden, layers, inputs, outputs", [(1, 1, 1, 1), (100, 2, 128, 32), (128, 2, 128, 7), (136, 4, 40, 31), (256, 3, 256, 32)]
)
def test_steps_of_mixed_streams_match_the_reference(
    form: Form, storage: torch.dtype, hidden: int, layers: int, inputs: int, outputs: int
) -> None:
    """Bits do not depend on the other streams, and are the same when the kernel ends after each step."""
    streams = Streams.random(form, storage, hidden, layers, inputs, outputs)
    order = random.Random(hidden).sample([*range(STREAMS)] * STEPS, STREAMS * STEPS)
    expected = [streams.expected(stream) for stream in range(STREAMS)]
    kernel, other, ended = (streams.kernel() for _ in range(3))
    alone = [streams.answers(other, stream) for stream in range(STREAMS)]
    other.stop()
    mixed: list[Answers] = [[] for _ in range(STREAMS)]
    for stream in order:
        mixed[stream].append(streams.step(kernel, stream, len(mixed[stream])))
        assert (streams.step(ended, stream, len(mixed[stream]) - 1) == mixed[stream][-1]).all()
        ended.stop()
    kernel.stop()
    for stream in range(STREAMS):
        answers = np.stack(mixed[stream])
        error = np.abs(answers - expected[stream].cpu().numpy()).max()
        assert answers.shape == (STEPS, outputs) and error <= TOLERANCE[storage] * layers, f"an error of {error:.1e}"
        assert (answers == np.stack(alone[stream])).all()


@pytest.mark.parametrize("form", [LSTM, GRU], ids=str)
def test_states_are_in_their_slots_when_it_has_ended(form: Form) -> None:
    streams = Streams.random(form, HALF, 128, 1, 128)
    states, (layer,) = streams.states(), streams.layers
    kernel = streams.kernel(states)
    streams.step(kernel, 1, 0)
    kernel.stop()
    x = Ragged(streams.inputs[1, :1].cuda(), torch.tensor([0, 1]).cuda())
    exact = form.exact(Arguments(x, layer.weights, map_arrays(layer.state, lambda array: array[2, None]))).state
    for name, array in arrays(states[0]).items():
        torch.testing.assert_close(array[3], getattr(exact, name)[0].float(), atol=TOLERANCE[HALF], rtol=0)
        assert (array[:3] == getattr(layer.state, name)[:3]).all() and (array[4:] == getattr(layer.state, name)[4:]).all()


def test_watchdog_ends_it_and_the_next_step_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "IDLE_SECONDS", 0.02)
    streams = Streams.random(LSTM, HALF, 64, 2, 64)
    kernel, other = streams.kernel(), streams.kernel()
    expected = streams.answers(other, 0)
    other.stop()
    for step in range(STEPS):
        assert (streams.step(kernel, 0, step) == expected[step]).all()
        until = time.monotonic() + 5
        while kernel.runs and time.monotonic() < until:
            time.sleep(0.01)
        assert not kernel.runs
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    "form, storage, sizes, reason",
    [
        (LSTM, FLOAT32, (64, 1, 64), "needs float16 or bfloat16 weights"),
        (GRU_BEFORE, HALF, (64, 1, 64), "one product a step"),
        (PEEPHOLES, BFLOAT16, (264, 1, 64), "at most 256 hidden units"),
        (GRU, HALF, (64, 1, 136), "no more inputs than hidden units"),
        (LSTM, HALF, (64, 1, 64, 33), "at most 32 outputs"),
        (LSTM, HALF, (256, 8, 256), "no room for 8 layers"),
    ],
    ids=str,
)
def test_other_models_are_refused(form: Form, storage: torch.dtype, sizes: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ContractError, match=reason):
        Streams.random(form, storage, *sizes).kernel()
