"""Which implementation of a kernel family runs, and why.

A family lists its backends from the fastest to the last resort; the first that does not refuse is taken. The choice and the
refusals before it are data, so that they can be shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from kernels.contract import STORAGE, ContractError
from kernels.directions import composed

AUTO = "auto"
FAMILIES = ("lstm", "gru", "sru", "qrnn", "conv")


@dataclass(frozen=True, slots=True)
class Problem:
    """What a backend is asked to take on: sizes that are known before any data."""

    device: torch.device
    storage: torch.dtype
    hidden: int


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation. `refuses` gives the reason why it cannot or should not take a problem, or None; `how`, what is to be said
    of one that it takes; `together` runs two directions at once, where it can do better than one after the other."""

    name: str
    run: Callable[..., Any]
    refuses: Callable[[Problem], str | None]
    how: Callable[[Problem], str] | None = None
    together: Callable[..., Any] | None = None

    @property
    def both(self) -> Callable[..., Any]:
        """Two directions, as `kernels.directions.composed` has them."""
        return self.together or composed(self.run)


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that runs, and one line for each that was considered."""

    backend: Backend
    why: tuple[str, ...]


def takes_everything(problem: Problem) -> None:
    """What a last resort answers."""


def only_by_name(problem: Problem) -> str:
    """What the references answer when they are considered."""
    return "the oracle of the tests, only by name"


def choose(backends: Sequence[Backend], problem: Problem, wanted: str = AUTO) -> Choice:
    """The first backend that takes the problem, or the one named `wanted`; raises ContractError if there is none."""
    if wanted != AUTO:
        return _named(backends, wanted)
    why: list[str] = []
    for backend in backends:
        reason = backend.refuses(problem)
        if reason is None:
            return Choice(backend, (*why, f"{backend.name}: chosen" + (f" ({backend.how(problem)})" if backend.how else "")))
        why.append(f"{backend.name}: {reason}")
    raise ContractError(f"no backend takes {problem}: {'; '.join(why)}")


def cached_choice(backends: Callable[[], Sequence[Backend]]) -> Callable[[torch.device, torch.dtype, int, str], Choice]:
    """`choose` for the calls of a family, by device, storage, hidden and wanted: what a backend answers once, it answers always.

    backends: asked when a choice is made, and not before.
    """

    @cache
    def chosen(device: torch.device, storage: torch.dtype, hidden: int, wanted: str) -> Choice:
        return choose(backends(), Problem(device, storage, hidden), wanted)

    return chosen


def explain(family: str, *, device: str, dtype: str, hidden: int) -> str:
    """One line for each backend considered for this problem, the chosen one last."""
    if family not in FAMILIES:
        raise ContractError(f"unknown kernel family {family!r}; known are {', '.join(FAMILIES)}")
    if dtype not in STORAGE:
        raise ContractError(f"unknown dtype {dtype!r}; known are {', '.join(STORAGE)}")
    try:
        problem = Problem(torch.device(device), STORAGE[dtype], hidden)
    except RuntimeError:
        raise ContractError(f"unknown device {device!r}; known are cpu and cuda:N") from None
    return "\n".join(choose(import_module(f"kernels.{family}").BACKENDS, problem).why)


def _named(backends: Sequence[Backend], wanted: str) -> Choice:
    for backend in backends:
        if backend.name == wanted:
            return Choice(backend, (f"{wanted}: asked for by name",))
    raise ContractError(f"unknown backend {wanted!r}; known are {', '.join(one.name for one in backends)}")
