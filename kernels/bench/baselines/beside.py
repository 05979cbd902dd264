"""Other computations, as large as a layer of ours and over the same data, which it is held against. They give other answers, so that
each is compared with a right one of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from kernels.bench.agreement import Expected, expected, tolerance
from kernels.bench.baselines.baseline import Call
from kernels.bench.baselines.layers import padded
from kernels.bench.baselines.sru_package import sru_package
from kernels.bench.given import Given, another
from kernels.contract import ConvWeights


def one_product(given: Given) -> Call:
    """(tokens, window x inputs) @ (window x inputs, 3 x hidden), all that a library is asked for by a layer that multiplies once."""
    weights = given.weights[0].input
    matrix = weights.reshape(-1, weights.shape[-1])
    data = given.x.data.repeat(1, len(matrix) // given.x.data.shape[1])
    right = _few(data, matrix.shape[1], lambda few: few.double() @ matrix.double(), terms=len(matrix))
    return Call(lambda: torch.mm(data, matrix), right=right)


def square_product(given: Given) -> Call:
    """Of the data, as many rows as columns, and a matrix as large: all that a device can do."""
    data = given.x.data
    generator = torch.Generator(data.device).manual_seed(1)
    matrix = torch.randn(data.shape[1], data.shape[1], generator=generator, device=data.device) * data.shape[1] ** -0.5
    matrix = matrix.to(data.dtype)
    right = _few(data, len(matrix), lambda few: few.double() @ matrix.double(), terms=len(matrix))
    return Call(lambda: torch.mm(data, matrix), right=right)


def lstm(given: Given) -> Call:
    """torch.nn.LSTM, padded, on a GPU cuDNN's."""
    other = another(given, "lstm")
    return replace(padded(other), right=expected(other))


def first_sru_package(given: Given) -> Call:
    """The package's SRU v1."""
    other = another(given, "sru", "v1")
    return replace(sru_package(other), right=expected(other))


def convolution(width: int, channels_last: bool = False) -> Callable[[Given], Call]:
    """torch's conv1d over a step and those before it, without bias: (rows, hidden, steps). Zeros stand before the rows already."""
    return partial(_convolution, width, channels_last)


def _convolution(width: int, channels_last: bool, given: Given) -> Call:
    """channels_last: how data and filters lie in memory, the same numbers under the same names of axes."""
    rows, steps, inputs = len(given.lengths), given.lengths[0], given.workload.inputs
    assert not given.ragged
    filters = torch.randn(width, inputs, given.workload.hidden, device=given.x.data.device) * (width * inputs) ** -0.5
    layer = ConvWeights(filters.to(given.x.data.dtype), given.x.data.new_zeros(given.workload.hidden), left=width - 1)
    right = expected(replace(given, workload=replace(given.workload, family="conv", form=""), weights=(layer,)))
    data = pad(given.x.data.view(rows, steps, inputs), (0, 0, width - 1, 0)).transpose(1, 2)
    taps = layer.filters.permute(2, 0, 1).contiguous().transpose(1, 2)
    if not channels_last:
        data, taps = data.contiguous(), taps.contiguous()
    return Call(lambda: conv1d(data, taps), lambda answer: answer.transpose(1, 2).flatten(0, 1), right)


def device_copy(given: Given) -> Call:
    """From one place in the device's memory to another: as many bytes read as written. By a kernel, as the copies that a graph knows are
    slower."""
    source, target = given.x.data, torch.empty_like(given.x.data)
    return Call(lambda: torch.mul(source, 1, out=target), right=_few(source, source.shape[1], Tensor.double, terms=1))


def _few(data: Tensor, columns: int, answers: Callable[[Tensor], Tensor], terms: int) -> Expected:
    """Where each token has its own answer, the first, the middle and the last one stand for the others."""
    at = torch.tensor([0, len(data) // 2, len(data) - 1], device=data.device)
    return Expected(at, answers(data[at]), (len(data), columns), tolerance(data.dtype, 0, terms))
