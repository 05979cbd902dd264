"""A model on a device: its layers front to back, then its head. What can be computed at load is computed here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.contract import Outputs, Ragged
from service.zoo.heads import Classify
from service.zoo.layers import Embedded, FirstInput, Folded, LSTMStack
from service.zoo.spec import EmbeddingLayer, LSTMLayer, ModelSpec

TRIAL_ROWS, TRIAL_STEPS, TRIAL_RUNS = 4, 16, 5


class Encoding(NamedTuple):
    """What a model gives for a batch, float32: scores (rows, labels), embedding (rows, width), sequence (tokens, width)."""

    scores: Tensor
    embedding: Tensor
    sequence: Tensor | None


class Encoder:
    """One version of one model, ready to run on `device`."""

    def __init__(self, spec: ModelSpec, arrays: Mapping[str, Tensor], device: torch.device, fold_limit_bytes: int) -> None:
        self.spec = spec
        self.device = device
        self._stacks = [
            LSTMStack(layer, _under(arrays, f"layers.{index}."), device)
            for index, layer in enumerate(spec.layers)
            if isinstance(layer, LSTMLayer)
        ]
        self._head = Classify(spec.head, arrays, device)
        self._first = self._first_input(arrays, fold_limit_bytes)

    @torch.inference_mode()
    def __call__(self, x: Ragged, *, sequence: bool = False) -> Encoding:
        """x.data: (tokens,) ids or (tokens, features) float32. `sequence` also asks for every step of the last layer."""
        want, first = self._head.wants(steps=sequence), self._first
        for stack in self._stacks[:-1]:
            below, _ = stack(x, Outputs(steps=True), first)
            assert below.steps is not None
            x, first = Ragged(below.steps, x.offsets), None
        encoded, _ = self._stacks[-1](x, want, first)
        pooled = self._head.pooled(encoded)
        return Encoding(self._head.scores(pooled), pooled, encoded.steps)

    def backends(self) -> dict[str, str]:
        """What runs each layer, by the layer's name."""
        recurrent = (index for index, layer in enumerate(self.spec.layers) if isinstance(layer, LSTMLayer))
        first = {"layers.0": self._first.name} if self._first else {}
        return first | {f"layers.{index}": stack.backend() for index, stack in zip(recurrent, self._stacks, strict=True)}

    def weight_bytes(self) -> int:
        """Bytes of weights and tables held on the device."""
        held = [tensor for part in (*self._stacks, self._head, self._first) if part is not None for tensor in part.tensors()]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def trial(self, rows: int, steps: int) -> float:
        """Seconds of one batch of equal rows, made up and thrown away."""
        x = self._made_up(rows, steps)
        start = time.perf_counter()
        self(x)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _first_input(self, arrays: Mapping[str, Tensor], fold_limit_bytes: int) -> FirstInput | None:
        """The embedding as a table of gate inputs where that fits the limit and measures faster, else as it is."""
        if not isinstance(self.spec.layers[0], EmbeddingLayer):
            return None
        table, lowest = arrays["layers.0.weight"].to(self.device), self._stacks[0].levels[0]
        embedded = Embedded(table)
        if Folded.bytes(table, lowest) > fold_limit_bytes:
            return embedded
        return min(Folded(table, lowest), embedded, key=self._seconds_with)

    def _seconds_with(self, first: FirstInput) -> float:
        self._first = first
        self.trial(TRIAL_ROWS, TRIAL_STEPS)
        return statistics.median(self.trial(TRIAL_ROWS, TRIAL_STEPS) for _ in range(TRIAL_RUNS))

    def _made_up(self, rows: int, steps: int) -> Ragged:
        offsets = torch.arange(rows + 1, device=self.device, dtype=torch.int32) * steps
        if self.spec.input.features is not None:
            return Ragged(torch.zeros(rows * steps, self.spec.input.features, device=self.device), offsets)
        ids = torch.arange(rows * steps, device=self.device, dtype=torch.int32) % (self.spec.input.vocabulary or 1)
        return Ragged(ids, offsets)


def _under(arrays: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
