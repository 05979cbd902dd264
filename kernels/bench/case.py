"""The random arguments of a workload, from a fixed seed, and calls of our backends with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels.bench.weights import STORED, Normal, family_of, weights
from kernels.bench.workload import BASELINES_ONLY, ENCODER, IDS, NEXT_STEPS, STACKS, TEXT_CNNS, VOCABULARY, WANT, Workload
from kernels.directions import compose_levels
from kernels.ragged import Outputs, Ragged, state_arrays


@dataclass(frozen=True, slots=True)
class BenchCase:
    """A workload with its data and weights, in its dtype and on one device.

    weights: one layer, the directions of each level of an encoder, the layers of a text CNN, the blocks of a stack, or nothing for a
    workload without an encoder. state: of the rows, in state caches, or None for zeros.
    """

    workload: Workload
    x: Ragged
    lengths: list[int]
    weights: tuple[Any, ...]
    state: Any = None

    @property
    def want(self) -> str:
        return WANT[self.workload.kind]

    @property
    def ragged(self) -> bool:
        return min(self.lengths) != max(self.lengths)

    @property
    def levels(self) -> tuple[tuple[Any, ...], ...]:
        """The weights of a recurrent layer or encoder: the directions of each level."""
        return self.weights if self.workload.kind == ENCODER else (self.weights,)

    def encoder(self, backend: str) -> Callable[[], Tensor]:
        """Return a call as in user code, which returns (rows, hidden), or (tokens, hidden) for every step.

        The outputs of both directions are joined.
        """
        family, want = import_module(f"kernels.{self.workload.family}"), Outputs(**{self.want: True})
        if self.workload.kind in TEXT_CNNS:
            return lambda: getattr(family.text_cnn(self.x, self.weights, backend=backend), self.want)
        if self.workload.kind in STACKS:
            return lambda: getattr(family.stack(self.x, self.weights, want=want, backend=backend), self.want)
        if self.workload.kind == ENCODER:
            return lambda: self._run_levels(family, want, backend)
        encode, (layer,) = getattr(family, self.workload.family), self.weights
        return lambda: getattr(encode(self.x, layer, self.state, want=want, backend=backend), self.want)

    def _run_levels(self, family: Any, want: Outputs, backend: str) -> Tensor:
        """Run each level over the outputs of the level before, as the service does."""
        if self.workload.directions == 1:
            encoded = family.levels(self.x, [layer for (layer,) in self.levels], want=want, backend=backend)
        else:
            encoded = compose_levels(partial(family.bidirectional, backend=backend))(self.x, self.levels, None, want=want)
        answer: Tensor = getattr(encoded, self.want)
        return answer


def random_case(workload: Workload, device: torch.device) -> BenchCase:
    """Return a case with normal data, or with uniformly distributed token ids."""
    generator = torch.Generator(device).manual_seed(0)
    lengths = workload.row_lengths()
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    normal = _normal(workload, generator)
    if workload.kind in IDS:
        vocabulary = workload.inputs if workload.kind == "folded" else VOCABULARY
        ids = torch.randint(vocabulary, (sum(lengths),), generator=generator, device=device, dtype=torch.int32)
        return BenchCase(workload, Ragged(ids, offsets), lengths, weights(workload, normal))
    x = Ragged(normal(sum(lengths), workload.inputs), offsets)
    layers = () if workload.kind in BASELINES_ONLY else weights(workload, normal)
    return BenchCase(workload, x, lengths, layers, _state(workload, generator) if workload.kind == NEXT_STEPS else None)


def case_for_layer(case: BenchCase, family: str, form: str = "") -> BenchCase:
    """Return a case with a layer of another family, with the same size and data."""
    workload = replace(case.workload, family=family, form=form)
    normal = _normal(workload, torch.Generator(case.x.data.device).manual_seed(1))
    return replace(case, workload=workload, weights=weights(workload, normal))


def embedded_case(case: BenchCase) -> tuple[Tensor, BenchCase]:
    """Return an embedding, (vocabulary, hidden), and a layer over the embedded token ids, with the form and size of a folded layer."""
    workload = replace(case.workload, kind="layer", inputs=case.workload.hidden)
    normal = _normal(workload, torch.Generator(case.x.data.device).manual_seed(1))
    embedding = normal(case.workload.inputs, workload.inputs)
    x = Ragged(embedding[case.x.data.long()], case.x.offsets)
    return embedding, replace(case, workload=workload, x=x, weights=weights(workload, normal))


def _state(workload: Workload, generator: torch.Generator) -> Any:
    """Return the states of the rows in caches of twice as many slots. Rows read and write slots in random order."""
    kind, slots, device = family_of(workload).state, 2 * workload.rows, generator.device
    caches = (torch.rand(slots, workload.hidden, generator=generator, device=device) - 0.5 for _ in state_arrays(kind))
    sources, targets = torch.randperm(slots, generator=generator, device=device, dtype=torch.int32).chunk(2)
    return kind(*caches, slots=targets, sources=sources)


def _normal(workload: Workload, generator: torch.Generator) -> Normal:
    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=generator.device) * scale
        return values.to(STORED[workload.dtype])

    return normal
