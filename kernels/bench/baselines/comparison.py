"""Other computations with the size and the data of our layers. Each has its own expected answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from kernels.bench.agreement import ExpectedAnswer, expected_answer, tolerance
from kernels.bench.baselines.baseline import TimedCall
from kernels.bench.baselines.layers import padded
from kernels.bench.baselines.packages import sru_package
from kernels.bench.case import BenchCase, case_for_layer
from kernels.conv.types import ConvWeights


def one_product(case: BenchCase) -> TimedCall:
    """(tokens, window x inputs) @ (window x inputs, 3 x hidden): the only library call of a layer that multiplies once."""
    weights = case.weights[0].input
    matrix = weights.reshape(-1, weights.shape[-1])
    return _product(case.x.data.repeat(1, len(matrix) // case.x.data.shape[1]), matrix)


def step_products(case: BenchCase) -> TimedCall:
    """The products of the next steps of an LSTM or a GRU alone: that of all inputs, then one of the hidden vectors for each step."""
    (layer,), data, hidden = case.weights, case.x.data, case.state.by_row().hidden.to(case.x.data.dtype)

    def run() -> Tensor:
        torch.mm(data, layer.input)
        for _ in range(case.workload.steps):
            answer = torch.mm(hidden, layer.recurrent)
        return answer

    return TimedCall(run, expected=_product(hidden, layer.recurrent).expected)


def square_product(case: BenchCase) -> TimedCall:
    """The square data times a random matrix of the same size: the highest rate of the device."""
    data = case.x.data
    generator = torch.Generator(data.device).manual_seed(1)
    matrix = torch.randn(data.shape[1], data.shape[1], generator=generator, device=data.device) * data.shape[1] ** -0.5
    return _product(data, matrix.to(data.dtype))


def _product(data: Tensor, matrix: Tensor) -> TimedCall:
    expected = _few_tokens(data, matrix.shape[1], lambda few: few.double() @ matrix.double(), terms=len(matrix))
    return TimedCall(lambda: torch.mm(data, matrix), expected=expected)


def lstm(case: BenchCase) -> TimedCall:
    """torch.nn.LSTM, padded: cuDNN on a GPU."""
    other = case_for_layer(case, "lstm")
    return replace(padded(other), expected=expected_answer(other))


def first_sru_package(case: BenchCase) -> TimedCall:
    """The SRU v1 of the package."""
    other = case_for_layer(case, "sru", "v1")
    return replace(sru_package(other), expected=expected_answer(other))


def convolution(width: int, channels_last: bool = False) -> Callable[[BenchCase], TimedCall]:
    """Return a builder of torch's conv1d over a step and the steps before it, without bias.

    channels_last: the memory layout of data and filters. The zeros before the rows are added before the clock starts.
    """

    def build(case: BenchCase) -> TimedCall:
        rows, steps, inputs = len(case.lengths), case.lengths[0], case.workload.inputs
        assert not case.ragged
        filters = torch.randn(width, inputs, case.workload.hidden, device=case.x.data.device) * (width * inputs) ** -0.5
        layer = ConvWeights(filters.to(case.x.data.dtype), case.x.data.new_zeros(case.workload.hidden), left=width - 1)
        as_conv = replace(case, workload=replace(case.workload, family="conv", form=""), weights=(layer,))
        data = pad(case.x.data.view(rows, steps, inputs), (0, 0, width - 1, 0)).transpose(1, 2)
        taps = layer.filters.permute(2, 0, 1).contiguous().transpose(1, 2)
        if not channels_last:
            data, taps = data.contiguous(), taps.contiguous()
        return TimedCall(
            lambda: conv1d(data, taps), lambda answer: answer.transpose(1, 2).flatten(0, 1), expected_answer(as_conv)
        )

    return build


def device_copy(case: BenchCase) -> TimedCall:
    """A copy within the device's memory, by a kernel: the copies that a CUDA graph captures are slower."""
    source, target = case.x.data, torch.empty_like(case.x.data)
    expected = _few_tokens(source, source.shape[1], Tensor.double, terms=1)
    return TimedCall(lambda: torch.mul(source, 1, out=target), expected=expected)


def _few_tokens(data: Tensor, columns: int, answers: Callable[[Tensor], Tensor], terms: int) -> ExpectedAnswer:
    """Return the expected answers of the first, the middle and the last token, which represent all: tokens are independent."""
    at = torch.tensor([0, len(data) // 2, len(data) - 1], device=data.device)
    return ExpectedAnswer(at, answers(data[at]), (len(data), columns), tolerance(data.dtype, 0, terms))
