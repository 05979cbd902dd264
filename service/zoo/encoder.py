"""A model on a device: its layers front to back, then its head. What can be computed at load is computed here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.contract import Outputs, Ragged
from service.zoo import heads, layers
from service.zoo.heads import Verdict
from service.zoo.layer import Runs
from service.zoo.spec import EmbeddingLayer, ModelSpec

TRIAL_ROWS, TRIAL_STEPS, TRIAL_RUNS = 4, 16, 5


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a model gives for a batch: the head's verdict, and, if wanted, sequence: (steps, width) float32 of the last layer.

    offsets: (rows + 1,) where each row's steps begin in what is given per step.
    """

    verdict: Verdict
    sequence: Tensor | None
    offsets: Tensor


class Encoder:
    """One version of one model, ready to run on `device`."""

    def __init__(self, spec: ModelSpec, arrays: Mapping[str, Tensor], device: torch.device, fold_limit_bytes: int) -> None:
        self.spec = spec
        self.device = device
        self._layers: dict[str, Runs] = {}
        inputs = spec.input.vocabulary or spec.input.features or 0
        for index, layer in enumerate(spec.layers):
            name = f"layers.{index}"
            if not isinstance(layer, EmbeddingLayer):
                self._layers[name] = layers.build(layer, inputs, _under(arrays, f"{name}."), device)
            inputs = layer.outputs
        self._head = heads.build(spec.head, arrays, device)
        if isinstance(spec.layers[0], EmbeddingLayer):
            self._take_ids(arrays["layers.0.weight"].to(device), fold_limit_bytes)

    @torch.inference_mode()
    def __call__(self, x: Ragged, *, sequence: bool = False) -> Encoding:
        """x.data: (tokens,) ids or (tokens, features) float32. `sequence` also asks for every step of the last layer."""
        want = replace(self._head.wants, steps=self._head.wants.steps or sequence)
        *below, top = self._layers.values()
        for layer in below:
            encoded = layer(x, Outputs(steps=True))
            assert encoded.steps is not None
            x = Ragged(encoded.steps, x.offsets if encoded.offsets is None else encoded.offsets)
        encoded = top(x, want)
        offsets = x.offsets if encoded.offsets is None else encoded.offsets
        return Encoding(self._head(encoded, offsets), encoded.steps if sequence else None, offsets)

    def backends(self) -> dict[str, str]:
        """What runs each layer, by the layer's name."""
        first = next(iter(self._layers.values())).takes_ids
        embedding = {"layers.0": first} if first is not None else {}
        return embedding | {name: layer.backend() for name, layer in self._layers.items()}

    def weight_bytes(self) -> int:
        """Bytes of weights and tables held on the device."""
        held = [tensor for layer in self._layers.values() for tensor in layer.tensors()] + self._head.tensors()
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def trial(self, rows: int, steps: int) -> float:
        """Seconds of one batch of equal rows, made up and thrown away; rows have at least the steps that the model needs."""
        x = self._made_up(rows, steps)
        start = time.perf_counter()
        self(x)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _take_ids(self, table: Tensor, fold_limit_bytes: int) -> None:
        """The embedding folded into the first layer where that fits the limit and measures faster, else as it is."""
        first = next(iter(self._layers.values()))
        if first.folded_bytes(table) > fold_limit_bytes:
            first.embed(table)
            return
        ways: list[Callable[[Tensor], None]] = [first.fold, first.embed]
        min(ways, key=lambda way: self._seconds_after(way, table))(table)

    def _seconds_after(self, way: Callable[[Tensor], None], table: Tensor) -> float:
        way(table)
        self.trial(TRIAL_ROWS, TRIAL_STEPS)  # the first run of anything is slower
        return statistics.median(self.trial(TRIAL_ROWS, TRIAL_STEPS) for _ in range(TRIAL_RUNS))

    def _made_up(self, rows: int, steps: int) -> Ragged:
        steps = max(steps, self.spec.min_steps)
        offsets = torch.arange(rows + 1, device=self.device, dtype=torch.int32) * steps
        if self.spec.input.features is not None:
            return Ragged(torch.zeros(rows * steps, self.spec.input.features, device=self.device), offsets)
        ids = torch.arange(rows * steps, device=self.device, dtype=torch.int32) % (self.spec.input.vocabulary or 1)
        return Ragged(ids, offsets)


def _under(arrays: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
