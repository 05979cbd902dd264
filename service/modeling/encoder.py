"""A model on a device: its layers front to back, then its head. What can be computed at load is computed here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs, Ragged
from service.modeling import heads, layers
from service.modeling.heads import Verdict
from service.modeling.layer import Runs, held_bytes
from service.modeling.layers import Placed
from service.modeling.memory import Memory, Places, RunningPool
from service.modeling.spec import EmbeddingLayer, ModelSpec

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
        self._parts = layers.build_all(_placed(spec, arrays), device)
        self._head = heads.build(spec.head, arrays, device)
        self._top.linear = self._head.linear
        self._memory: Memory | None = None
        if isinstance(spec.layers[0], EmbeddingLayer):
            self._take_ids(arrays["layers.0.weight"].to(device), fold_limit_bytes)

    @property
    def streams(self) -> bool:
        """Whether a sequence may come in chunks, one after the other."""
        return self._head.streams and all(part.runs.streams for part in self._parts)

    @property
    def free_states(self) -> bool:
        """Whether a batch that goes on from places takes no longer than one that begins."""
        return all(part.runs.free_states for part in self._parts)

    def remember(self, places: int) -> None:
        """Make room for the states of sequences that come in chunks; `places` counts ZEROS and SCRAP."""
        pools = [name for name in ("mean", "max") if getattr(self._head.wants, name)]
        width = self.spec.layers[-1].outputs
        pool = RunningPool(pools[0], places, width, self.device) if pools else None  # type: ignore[arg-type]
        self._memory = Memory([part.runs.slabs(places) for part in self._parts], pool)

    @torch.inference_mode()
    def save(self, place: int) -> dict[str, Tensor]:
        """The state in one place, on the host, by layer and name."""
        assert self._memory is not None, "remember() makes room for states"
        return {name: slab[place].to("cpu", copy=True) for name, slab in self._memory.slabs().items()}

    @torch.inference_mode()
    def restore(self, place: int, state: Mapping[str, Tensor]) -> None:
        """A state that `save` gave into one place."""
        assert self._memory is not None, "remember() makes room for states"
        for name, slab in self._memory.slabs().items():
            slab[place].copy_(state[name])

    @torch.inference_mode()
    def __call__(self, x: Ragged, *, sequence: bool = False, places: Places | None = None) -> Encoding:
        """x.data: (tokens,) ids or (tokens, features) float32. `sequence` also asks for every step of the last layer.

        places: from which rows go on and to which they are written, once there is room for them; None begins and forgets all rows.
        """
        want = replace(self._head.wants, steps=self._head.wants.steps or sequence)
        for number in range(len(self._parts) - 1):
            encoded = self._run(number, x, Outputs(steps=True), places)
            assert encoded.steps is not None
            x = Ragged(encoded.steps, x.offsets if encoded.offsets is None else encoded.offsets)
        encoded = self._run(len(self._parts) - 1, x, want, places)
        offsets = x.offsets if encoded.offsets is None else encoded.offsets
        if places is not None and self._memory is not None and self._memory.pool is not None:
            encoded = self._memory.pool(encoded, offsets, places)
        return Encoding(self._head(encoded, offsets), encoded.steps if sequence else None, offsets)

    def backends(self) -> dict[str, str]:
        """What runs each layer, by the layer's name."""
        first = self._parts[0].runs.takes_ids
        embedding = {"layers.0": first} if first is not None else {}
        return embedding | {name: part.runs.backend() for part in self._parts for name in part.names}

    def weight_bytes(self) -> int:
        """Bytes of weights and tables held on the device, without states."""
        return held_bytes([tensor for part in self._parts for tensor in part.runs.tensors()] + self._head.tensors())

    def trial(self, rows: int, steps: int) -> float:
        """Seconds of one batch of equal rows, made up and thrown away; rows have at least the steps that the model needs."""
        x = self._made_up(rows, steps)
        start = time.perf_counter()
        self(x)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _run(self, number: int, x: Ragged, want: Outputs, places: Places | None) -> Encoded:
        runs = self._parts[number].runs
        if places is None:
            return runs(x, want)
        assert self._memory is not None, "remember() makes room for states"
        return runs.chunk(x, want, self._memory.states(number, places))[0]

    @property
    def _top(self) -> Runs:
        return self._parts[-1].runs

    def _take_ids(self, table: Tensor, fold_limit_bytes: int) -> None:
        """The embedding folded into the first layer where that fits the limit and measures faster, else as it is."""
        first = self._parts[0].runs
        needed = first.folded_bytes(table)
        if needed is None or needed > fold_limit_bytes:
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


def _placed(spec: ModelSpec, arrays: Mapping[str, Tensor]) -> list[Placed]:
    """The layers after the embedding, if there is one."""
    placed = []
    inputs = spec.input.vocabulary or spec.input.features or 0
    for index, layer in enumerate(spec.layers):
        name = f"layers.{index}"
        if not isinstance(layer, EmbeddingLayer):
            placed.append(Placed(name, layer, inputs, _under(arrays, f"{name}.")))
        inputs = layer.outputs
    return placed


def _under(arrays: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
