"""The kernel that stays (resident.cu): several layers and a product of outputs, for one step of one row at a time, host to host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kernels.backend import Problem
from kernels.compile import Kernel, resident_clusters, shared_limit
from kernels.launching import address, ceil_div, device_refusal, round_up
from kernels.persistent.choice import CLUSTERS, PersistentCell
from kernels.persistent.packing import PIECE_BYTES, PRODUCT_BYTES, Variant, of_four_gates, pack
from kernels.ragged import ContractError

BLOCKS, THREADS = 16, 512
"""Blocks of the cluster, each on a multiprocessor that no other kernel gets meanwhile, and threads of a block."""
WARPS = THREADS // 32
MOST_UNITS, MOST_OUTPUTS = 256, 32
IN_REGISTERS = 16
"""Products of a warp with weights in registers."""
IN_VECTOR, OUT_VECTOR = 6, 3
"""Inputs in 16 bits and outputs in float32 of a vector of 16 bytes, besides its number."""
STEP, STOP = 0, 1
"""Commands."""
FOREVER = 1 << 30
"""Requests after which the kernel ends, and the next request starts it again."""
IDLE_SECONDS = 1.0
"""Time without a request after which the kernel ends. The next request starts it again."""
PATIENCE_SECONDS = 0.5
"""Time that an answer may take."""


@dataclass(frozen=True)
class ResidentShape:
    """The sizes of the kernel. layers: their number, all of one size."""

    variant: Variant
    layers: int
    inputs: int
    outputs: int

    @property
    def units(self) -> int:
        """Hidden units of a block: one group of eight, or two."""
        return 8 if self.variant.hidden <= MOST_UNITS // 2 else 16

    @property
    def chunks(self) -> int:
        """Chunks of 32 entries of the two vectors of a layer. The inputs take as many as the hidden vector."""
        return 2 * BLOCKS * self.units // 32

    def refusal(self) -> str | None:
        """Return why the kernel cannot run these sizes on a device with clusters, or None."""
        if self.variant.vector:
            return "needs one product a step"
        if max(self.variant.hidden, self.inputs) > MOST_UNITS or self.inputs > BLOCKS * self.units:
            return f"takes at most {MOST_UNITS} hidden units, and no more inputs than hidden units"
        if self.outputs > MOST_OUTPUTS:
            return f"takes at most {MOST_OUTPUTS} outputs"
        if self.shared > shared_limit(self.variant.device):
            return f"has no room for {self.layers} layers"
        return None if resident_clusters(self.kernel(), self.shared) else f"needs room for a cluster of {BLOCKS} blocks"

    @property
    def request_vectors(self) -> int:
        """Vectors of a request: the slots and the command, then the inputs."""
        return 1 + ceil_div(self.inputs, IN_VECTOR)

    @property
    def answer_vectors(self) -> int:
        return ceil_div(self.outputs, OUT_VECTOR)

    @property
    def products(self) -> int:
        """Weights of a warp, in products."""
        of_layer = ceil_div(self.chunks, WARPS // (self.units // 8))
        return 4 * (self.layers * of_layer + ceil_div(self.chunks // 2, WARPS))

    @property
    def held(self) -> int:
        return min(self.products, IN_REGISTERS)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: sizeof(Memory)."""
        padded = 32 * self.chunks // 2
        spilled = max(1, self.products - self.held) * WARPS * PRODUCT_BYTES
        vectors = (self.layers + 1) * 2 * padded // 8 * PIECE_BYTES
        parts, biases, outgoing = WARPS * 8 * 16, 16 * self.layers * self.units + 4 * MOST_OUTPUTS, 2 * (padded + 8)
        sizes = spilled, vectors, parts, biases, outgoing, 4 * MOST_OUTPUTS, 16, 8 * (self.layers + 1)
        return round_up(sum(sizes), 16)

    def kernel(self) -> Kernel:
        return self.variant.load(
            "resident.cu",
            threads=THREADS,
            cluster=BLOCKS,
            SIDES=1,
            CTAS=BLOCKS,
            LAYERS=self.layers,
            UNITS=self.units,
            CHUNKS=self.chunks,
            HELD=self.held,
            INPUTS=self.inputs,
            OUTPUTS=self.outputs,
            SHARED=self.shared,
        )


class Resident:
    """A stack of layers and a product of outputs in device memory, with requests and answers in mapped host memory.

    One request is under way at a time. States are in the slots of their caches: a request names the slot from which the row starts and the
    slot of its new state. Nothing else may change the slot of the last new state while the kernel stays: it is kept on the device. While
    it stays, calls that wait for the device wait for it, such as the first use of another kernel.
    """

    def __init__(
        self, cell: PersistentCell, layers: Sequence[Any], states: Sequence[Any], output: Tensor, bias: Tensor
    ) -> None:
        """layers: of one size and direction, with input weights; states: their state caches, (slots, hidden) float32; output: (hidden,
        outputs); bias: (outputs,). Raises ContractError for sizes that the kernel does not take."""
        first = layers[0]
        alike = all(layer.place == first.place and layer.input is not None for layer in layers)
        if not alike or any(len(layer.input) != first.hidden for layer in layers[1:]) or output.dtype != first.array.dtype:
            raise ContractError(
                "a resident kernel needs layers of one size and dtype with input weights, and outputs in that dtype"
            )
        if set(first.variants) - set(cell.runs):
            raise ContractError(f"a resident kernel does not run {', '.join(first.variants)}")
        problem = Problem(first.array.device, first.array.dtype, first.hidden, first.variants, first.vector)
        self.shape = ResidentShape(cell.variant(problem), len(layers), len(first.input), output.shape[1])
        if refusal := device_refusal(problem, CLUSTERS, halves=True) or self.shape.refusal():
            raise ContractError(f"a resident kernel {refusal}")
        self._kernel, self._hidden, self._dtype = self.shape.kernel(), first.hidden, first.array.dtype
        arrays: list[Tensor | None] = []
        for layer, state in zip(layers, states, strict=True):
            own, (hidden, *others) = cell.own(layer), (getattr(state, name) for name in cell.arrays)
            # A GRU's hidden values are sent as sixteenths, and sums are multiplied by 16. Inputs of the host are no sixteenths.
            packed = _pack_layer(layer, self.shape, 16 if cell.gru and layer is first else 1)
            arrays += packed, layer.bias.float(), None if own is None else own.float(), hidden
            arrays += others or [None]
        padding = (0, MOST_OUTPUTS - self.shape.outputs)
        arrays += pack(functional.pad(output, padding), 1, self.shape.chunks // 2, 8), functional.pad(bias.float(), padding)
        self.requests, self.answers, ended = map(_mapped, (self.shape.request_vectors, self.shape.answer_vectors, 1))
        self._arrays = [*arrays, self.requests, self.answers, ended, hidden.new_zeros(1, dtype=torch.int32)]
        self._request, self._answer, self._ended = self.requests.numpy(), self.answers.numpy(), ended.numpy()
        self._ended[:] = 1
        torch.cuda.current_stream().synchronize()  # the kernel starts on another stream
        self._stream = torch.cuda.Stream(hidden.device)  # type: ignore[no-untyped-call] # torch's own code has no types there
        self.number = 0
        """The number of the last request."""

    @property
    def runs(self) -> bool:
        """Whether the kernel stays on the device."""
        return not self._ended[0, 0]

    def launch(self, requests: int = FOREVER) -> None:
        """Launch the kernel on torch's stream for this number of requests. A CUDA graph may capture the launch for one request."""
        members = (*map(address, self._arrays), self._hidden, requests, int(IDLE_SECONDS * 1e9))
        self._kernel.launch((BLOCKS, 1, 1), self.shape.shared, members)

    def step(self, vectors: NDArray[np.int32], before: int, after: int) -> NDArray[np.float32]:
        """Run a step and return its outputs; raises RuntimeError if the device does not answer. The arguments are as in `send`.

        Unless the kernel runs already, it starts on another stream, behind the work of torch's stream.
        """
        self.send(vectors, before, after)
        until = time.monotonic() + PATIENCE_SECONDS
        while (outputs := self.received()) is None:
            if not self.runs:
                self._start()
            if time.monotonic() > until:
                raise RuntimeError("the resident kernel has not answered")
        return outputs

    def _start(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        self._ended[:] = 0
        try:
            with torch.cuda.stream(self._stream):
                self.launch()
        except RuntimeError:
            self._ended[:] = 1
            raise

    def vectors(self, inputs: Tensor) -> NDArray[np.int32]:
        """Return the vectors of steps, without numbers, (steps, vectors, 3). inputs: (steps, inputs), on the host."""
        count = self.shape.request_vectors - 1
        padded = functional.pad(inputs.to(self._dtype), (0, count * IN_VECTOR - self.shape.inputs))
        vectors: NDArray[np.int32] = padded.view(torch.int32).view(len(inputs), count, 3).numpy()
        return vectors

    def send(self, vectors: NDArray[np.int32], before: int, after: int) -> None:
        """Send a request: the inputs of a row as `vectors` returns them, and the slots from which it starts and in which it ends."""
        self._request[1:, :3] = vectors
        self._command(STEP, before, after)

    def _command(self, command: int, before: int = 0, after: int = 0) -> None:
        self._request[0, :3] = before, after, command
        self.number = (self.number + 1 + 2**31) % 2**32 - 2**31  # as an int32
        self._request[:, 3] = self.number  # after the content, so that no vector has its number without it

    def received(self) -> NDArray[np.float32] | None:
        """Return the outputs of the last request, or None before they arrive."""
        if (self._answer[:, 3] != self.number).any():
            return None
        return self._answer[:, :3].copy().view(np.float32).ravel()[: self.shape.outputs]

    def stop(self) -> None:
        """End the kernel if it runs, and wait until it has ended: other work may then read and write the states."""
        if not self.runs:
            return
        self._command(STOP)
        self._stream.synchronize()
        self._arrays[-1].fill_(self.number)  # the watchdog may have ended the kernel before it read the command


def _pack_layer(layer: Any, shape: ResidentShape, scale: int) -> Tensor:
    """Return the weights of [x | h] as left operands of tensor-core products, with the weights of h times `scale`. The inputs are
    padded to the width of the hidden vector."""
    hidden, entries = layer.hidden, 32 * shape.chunks // 2
    recurrent = functional.pad(layer.recurrent * scale, (0, 4 * hidden - layer.recurrent.shape[1]))
    inputs = functional.pad(of_four_gates(layer.input, hidden), (0, 0, 0, entries - len(layer.input)))
    return pack(torch.cat((inputs, recurrent)), BLOCKS * shape.units // 8, shape.chunks, hidden)


def _mapped(vectors: int) -> Tensor:
    """Return vectors of four words in host memory that the device reads and writes."""
    return torch.zeros((vectors, 4), dtype=torch.int32, pin_memory=True)
