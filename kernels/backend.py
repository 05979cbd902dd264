"""Which implementation of a kernel family runs, and why.

A family lists its backends from the fastest to the fallback; the first backend that does not refuse the problem runs. The choice and the
refusals before it are data, so that they can be shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from kernels.directions import compose_directions, compose_levels
from kernels.ragged import STORAGE, ContractError, RunKernel

AUTO, PINNED = "auto", "pinned"
"""Requests without a name: the fastest backend, or the fastest in which a row has the same bits in any batch."""
NOT_PINNED = "the bits of a row may change with the number of rows in its batch"
FAMILIES = ("rnn", "lstm", "gru", "sru", "qrnn", "mingru", "conv")


@dataclass(frozen=True, slots=True)
class Problem:
    """The properties that decide the choice of a backend. All are known before any data.

    variants: features of a layer beyond the plain layer of its family, for example peepholes; vector: the width of the hidden state, or
    None if it is `hidden`; tf32: as `allows_tf32`, for float32 layers on a GPU; levels: how many layers of this size read the steps of each
    other, in one direction.
    """

    device: torch.device
    storage: torch.dtype
    hidden: int
    variants: tuple[str, ...] = ()
    vector: int | None = None
    tf32: bool = False
    levels: int = 1


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of a kernel family.

    refuses: returns why it cannot or should not run a problem, or None; describe: returns details of how it runs a problem;
    bidirectional: runs both directions at once, for backends where that is faster than two runs; levels: the same for several levels.
    runs: the variants that it runs, or None for all. pinned: whether every batch runs by the same sums, so that a row has the same bits
    in any batch.
    """

    name: str
    run: RunKernel
    refuses: Callable[[Problem], str | None]
    describe: Callable[[Problem], str] | None = None
    bidirectional: RunKernel | None = None
    levels: RunKernel | None = None
    runs: tuple[str, ...] | None = ()
    pinned: bool = True

    def refusal(self, problem: Problem) -> str | None:
        """Return why this backend does not run the problem, or None."""
        return self.variants_refusal(problem) or self.refuses(problem)

    def variants_refusal(self, problem: Problem) -> str | None:
        """Return which variants of the problem this backend does not run, or None."""
        missing = [] if self.runs is None else [variant for variant in problem.variants if variant not in self.runs]
        return f"does not run {', '.join(missing)}" if missing else None

    @property
    def run_bidirectional(self) -> RunKernel:
        """Run both directions, with the signature that `kernels.directions.compose_directions` describes."""
        return self.bidirectional or compose_directions(self.run)

    @property
    def run_levels(self) -> RunKernel:
        """Run several levels, with the signature that `kernels.directions.compose_levels` describes."""
        return self.levels or compose_levels(self.run)


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that runs, and one line for each backend that was considered."""

    backend: Backend
    why: tuple[str, ...]


def accepts_everything(problem: Problem) -> None:
    """`Backend.refuses` of a fallback."""


def only_by_name(problem: Problem) -> str:
    """`Backend.refuses` of the references."""
    return "the oracle of the tests, runs only when requested by name"


def choose(backends: Sequence[Backend], problem: Problem, requested: str = AUTO) -> Choice:
    """Return the first backend that accepts the problem, or the requested one by name; raises ContractError if there is none.

    requested: AUTO, PINNED or a name.
    """
    if requested not in (AUTO, PINNED):
        return _by_name(backends, problem, requested)
    why: list[str] = []
    for backend in backends:
        reason = NOT_PINNED if requested == PINNED and not backend.pinned else backend.refusal(problem)
        if reason is None:
            details = f" ({backend.describe(problem)})" if backend.describe else ""
            return Choice(backend, (*why, f"{backend.name}: chosen{details}"))
        why.append(f"{backend.name}: {reason}")
    raise ContractError(f"no backend accepts {problem}: {'; '.join(why)}")


def allows_tf32(device: torch.device, storage: torch.dtype) -> bool:
    """Return whether the products of a layer may have 11 significant bits: of float32 on a GPU, if `torch.set_float32_matmul_precision`
    has been called with "high" or "medium", which also holds for the products of torch's libraries."""
    return storage == torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"


def cached_choice(backends: Sequence[Backend]) -> Callable[..., Choice]:
    """Return `choose` as a cached function of requested, device, storage, hidden, variants, vector and levels. Whether TF32 is allowed is
    asked in every call. A backend's answer for a problem never changes."""

    @cache  # by plain values: the hash of a Problem costs as much as the launch of a small kernel
    def cached(requested: str, *problem: Any) -> Choice:
        return choose(backends, Problem(*problem), requested)

    def chosen(
        requested: str,
        device: torch.device,
        storage: torch.dtype,
        hidden: int,
        variants: tuple[str, ...] = (),
        vector: int | None = None,
        levels: int = 1,
    ) -> Choice:
        return cached(requested, device, storage, hidden, variants, vector, allows_tf32(device, storage), levels)

    return chosen


def explain(family: str, *, device: str, dtype: str, hidden: int) -> str:
    """Return one line for each backend considered for this problem, the chosen one last."""
    if family not in FAMILIES:
        raise ContractError(f"unknown kernel family {family!r}, expected one of {', '.join(FAMILIES)}")
    if dtype not in STORAGE:
        raise ContractError(f"unknown dtype {dtype!r}, expected one of {', '.join(STORAGE)}")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ContractError(f"unknown device {device!r}, expected cpu or cuda:N") from None
    problem = Problem(place, STORAGE[dtype], hidden, tf32=allows_tf32(place, STORAGE[dtype]))
    return "\n".join(choose(import_module(f"kernels.{family}").BACKENDS, problem).why)


def _by_name(backends: Sequence[Backend], problem: Problem, name: str) -> Choice:
    for backend in backends:
        if backend.name == name:
            refusal = backend.variants_refusal(problem)
            if refusal is not None:
                raise ContractError(f"the backend {name!r} {refusal}")
            return Choice(backend, (f"{name}: requested by name",))
    raise ContractError(f"unknown backend {name!r}, expected one of {', '.join(backend.name for backend in backends)}")
