"""An LSTM of several layers as a loop over its steps, with a choice of optimisations.

The loop is a list of launches, made before the clock starts: a call only makes them, in the same order every time. Every launch writes into
arrays that are allocated once, so launches on different streams share no memory that the allocator could reuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path

import torch
from torch import Tensor

from kernels.bench.baselines.baseline import TimedCall, pad
from kernels.bench.baselines.discrete import lstm_cell
from kernels.bench.case import BenchCase
from kernels.compile import cupy_installed, load_kernel
from kernels.launching import ceil_div, device_index
from kernels.lstm.types import LSTMWeights

Launch = Callable[[], object]

SOURCE = Path(__file__).with_name("cell.cu")
THREADS = 256
FIRST, LAST = -1, 0
"""Priorities of streams. The next step waits for the recurrent product, so it goes first."""


@dataclass(frozen=True, slots=True)
class LadderPlan:
    """The optimisations of a loop.

    one_product: all gates have one product; two_streams: the products with the inputs run on a second stream; fused: one kernel runs all
    pointwise operations; transposed: matrices are in memory as (inputs, gates) instead of torch's (gates, inputs); combined_steps: the
    number of steps whose inputs are multiplied at once; wavefront: each layer has two streams, and begins a group of steps when the layer
    below has ended the group.
    """

    one_product: bool = False
    two_streams: bool = False
    fused: bool = False
    transposed: bool = False
    combined_steps: int = 1
    wavefront: bool = False

    def on(self, device: torch.device) -> LadderPlan:
        """Return the plan without the optimisations that a device lacks."""
        if device.type != "cuda":
            return replace(self, two_streams=False, fused=False, wavefront=False)
        return replace(self, fused=self.fused and cupy_installed())


@dataclass(frozen=True, slots=True)
class LadderLayer:
    """The arrays of a layer.

    inputs: (steps, rows, columns); input, recurrent: the matrices of its products, by gate or a single matrix; bias: (4 x units);
    of_inputs: (steps, rows, 4 x units) and of_hidden: (rows, 4 x units), the products; hidden: (1 + steps, rows, units), zeros first; cell:
    (rows, units).
    """

    inputs: Tensor
    input: Sequence[Tensor]
    recurrent: Sequence[Tensor]
    bias: Tensor
    of_inputs: Tensor
    of_hidden: Tensor
    hidden: Tensor
    cell: Tensor

    @classmethod
    def of(cls, weights: LSTMWeights, inputs: Tensor, plan: LadderPlan) -> LadderLayer:
        assert weights.input is not None and weights.bias is not None
        (steps, rows, _), hidden = inputs.shape, weights.hidden
        return cls(
            inputs,
            _matrices(weights.input, plan),
            _matrices(weights.recurrent, plan),
            weights.bias,
            inputs.new_empty(steps, rows, 4 * hidden),
            inputs.new_empty(rows, 4 * hidden),
            inputs.new_zeros(1 + steps, rows, hidden),
            inputs.new_empty(rows, hidden, dtype=torch.float32 if plan.fused else inputs.dtype),
        )

    def input_products(self, first: int, until: int) -> Iterator[Launch]:
        """Yield the launches that multiply the inputs of some steps."""
        yield from _products(self.inputs[first:until].flatten(0, 1), self.input, self.of_inputs[first:until].flatten(0, 1))

    def recurrent_products(self, step: int) -> Iterator[Launch]:
        yield from _products(self.hidden[step], self.recurrent, self.of_hidden)

    def pointwise(self, step: int, fused: bool) -> Launch:
        """Return the launches of the operations after the products of a step."""
        if not fused:
            blocks = self.of_inputs[step].chunk(4, dim=1), self.of_hidden.chunk(4, dim=1), self.bias.chunk(4)
            return partial(lstm_cell, *blocks, self.cell, into=(self.hidden[step + 1], self.cell))
        device, halves = device_index(self.bias.device), int(self.bias.dtype == torch.float16)
        kernel = load_kernel(SOURCE, device, threads=THREADS, HALVES=halves)
        arrays = self.of_inputs[step], self.of_hidden, self.bias, self.cell, self.hidden[step + 1]
        grid = ceil_div(self.cell.numel(), THREADS), 1, 1
        return partial(kernel.launch, grid, 0, [*(array.data_ptr() for array in arrays), *self.cell.shape])


def looped(plan: LadderPlan, case: BenchCase) -> TimedCall:
    """Return a call that runs all layers and returns the hidden vectors of the last layer's last step, (rows, units)."""
    plan = plan.on(case.x.data.device)
    layers: list[LadderLayer] = []
    inputs = pad(case)
    for (weights,) in case.levels:
        layers.append(LadderLayer.of(weights, inputs, plan))
        inputs = layers[-1].hidden[1:]
    launches = _Launches(len(layers) if plan.wavefront else int(plan.two_streams))
    _add_launches(launches, layers, plan)
    return TimedCall(partial(launches.run, inputs[-1]))


def _matrices(weight: Tensor, plan: LadderPlan) -> list[Tensor]:
    """Return the matrices (columns, gates) of a product. weight: (columns, 4 x units)."""
    parts = [weight] if plan.one_product else weight.chunk(4, dim=1)
    return [part.contiguous() if plan.transposed else part.t().contiguous().t() for part in parts]


def _products(data: Tensor, matrices: Sequence[Tensor], into: Tensor) -> Iterator[Launch]:
    for matrix, block in zip(matrices, into.chunk(len(matrices), dim=1), strict=True):
        yield partial(torch.mm, data, matrix, out=block)


class _Launches:
    """Launches in the order in which the host makes them. pairs: the number of pairs of streams, or 0 for the stream of the caller."""

    def __init__(self, pairs: int) -> None:
        self._launches: list[Launch] = []
        self._pairs = [(_stream(LAST), _stream(FIRST)) for _ in range(pairs)]
        self._current: torch.cuda.Stream | None = None

    def run(self, answer: Tensor) -> Tensor:
        """Make all launches, and return `answer`, which they write."""
        if not self._pairs:
            for launch in self._launches:
                launch()
            return answer
        callers, streams = torch.cuda.current_stream(), [stream for pair in self._pairs for stream in pair]
        for stream in streams:
            stream.wait_stream(callers)
        for launch in self._launches:
            launch()
        torch.cuda.set_stream(callers)
        for stream in streams:
            callers.wait_stream(stream)
        return answer

    def add(self, *launches: Launch) -> None:
        self._launches += launches

    def on_stream(self, layer: int, recurrent: bool) -> None:
        """Make the next launches on the stream of a layer's recurrent or input products."""
        if not self._pairs:
            return
        stream = self._pairs[layer % len(self._pairs)][recurrent]
        if stream is not self._current:
            self.add(partial(torch.cuda.set_stream, stream))
            self._current = stream

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after the launches on the current stream."""
        if self._current is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # as above
        self.add(partial(event.record, self._current))
        return event

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the current stream wait for an event."""
        if event is not None and self._current is not None:
            self.add(partial(self._current.wait_event, event))


def _stream(priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call] # torch's own code has no types there


def _add_launches(launches: _Launches, layers: Sequence[LadderLayer], plan: LadderPlan) -> None:
    """Add the launches of a call, by groups of steps of a layer."""
    ended: dict[tuple[int, int], torch.cuda.Event | None] = {}
    for number, group in _order(len(layers), ceil_div(len(layers[0].inputs), plan.combined_steps), plan.wavefront):
        layer = layers[number]
        first = group * plan.combined_steps
        until = min(first + plan.combined_steps, len(layer.inputs))
        launches.on_stream(number, recurrent=False)
        launches.wait(ended.get((number - 1, group)))
        launches.add(*layer.input_products(first, until))
        multiplied = launches.mark()
        launches.on_stream(number, recurrent=True)
        if first == 0:
            launches.add(layer.cell.zero_)
        for step in range(first, until):
            launches.add(*layer.recurrent_products(step))
            if step == first:
                launches.wait(multiplied)
            launches.add(layer.pointwise(step, plan.fused))
        if number + 1 < len(layers):
            ended[number, group] = launches.mark()


def _order(layers: int, groups: int, wavefront: bool) -> Iterator[tuple[int, int]]:
    """Yield a layer and a group of steps: layer by layer, or along the diagonals, so that several layers can run at the same time."""
    if not wavefront:
        for layer in range(layers):
            yield from zip(repeat(layer), range(groups))
        return
    for diagonal in range(layers + groups - 1):
        for layer in range(max(0, diagonal - groups + 1), min(layers, diagonal + 1)):
            yield layer, diagonal - layer
