"""The arguments of a workload: random, from a fixed seed, and how our own backends are called with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels.bench.weights import Normal, weights
from kernels.bench.workload import IDS, PEERS_ALONE, STACKS, TEXT_CNNS, VOCABULARY, WANT, Workload
from kernels.contract import STORAGE, Encoded, Outputs, Ragged


@dataclass(frozen=True, slots=True)
class Given:
    """x and weights in the workload's dtype on one device; several weights are the layers of a text CNN or the blocks of a stack.

    Without weights, the data are there for others than our encoders.
    """

    workload: Workload
    x: Ragged
    lengths: list[int]
    weights: tuple[Any, ...]

    @property
    def want(self) -> str:
        return WANT[self.workload.kind]

    @property
    def ragged(self) -> bool:
        return min(self.lengths) != max(self.lengths)

    def encoder(self, backend: str) -> Callable[[], Tensor]:
        """A call as users make it: (rows, hidden), or (tokens, hidden) where every step is wanted."""
        run, want = self._run(import_module(f"kernels.{self.workload.family}"), backend), self.want
        return lambda: getattr(run(), want)

    def _run(self, family: Any, backend: str) -> Callable[[], Encoded]:
        """family: its module."""
        want = Outputs(**{self.want: True})
        if self.workload.kind in TEXT_CNNS:
            return lambda: family.text_cnn(self.x, self.weights, backend=backend)
        if self.workload.kind in STACKS:
            return lambda: family.stack(self.x, self.weights, want=want, backend=backend)
        encode, (layer,) = getattr(family, self.workload.family), self.weights
        return lambda: encode(self.x, layer, want=want, backend=backend)


def made_up(workload: Workload, device: torch.device, seed: int = 0) -> Given:
    """Normal values, or of the kinds over token ids, ids as likely as each other."""
    generator = torch.Generator(device).manual_seed(seed)
    lengths = workload.row_lengths()
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    normal = _normal(workload, generator)
    if workload.kind in IDS:
        vocabulary = workload.inputs if workload.kind == "folded" else VOCABULARY
        ids = torch.randint(vocabulary, (sum(lengths),), generator=generator, device=device, dtype=torch.int32)
        return Given(workload, Ragged(ids, offsets), lengths, weights(workload, normal))
    x = Ragged(normal(sum(lengths), workload.inputs), offsets)
    return Given(workload, x, lengths, () if workload.kind in PEERS_ALONE else weights(workload, normal))


def another(given: Given, family: str, form: str = "") -> Given:
    """A layer of another family, as large and over the same data."""
    workload = replace(given.workload, family=family, form=form)
    normal = _normal(workload, torch.Generator(given.x.data.device).manual_seed(1))
    return replace(given, workload=workload, weights=weights(workload, normal))


def _normal(workload: Workload, generator: torch.Generator) -> Normal:
    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=generator.device) * scale
        return values.to(STORAGE[workload.dtype])

    return normal
