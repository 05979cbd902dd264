"""What a peer is, and what all of them need: optional packages and a padded batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kernels.bench.agreement import Expected
from kernels.bench.given import Given
from kernels.bench.workload import OURS_ALONE, Workload


class MissingError(Exception):
    """A peer cannot be had on this machine; the message says what to install."""


def as_it_is(answer: Any) -> Any:
    return answer


@dataclass(frozen=True, slots=True)
class Call:
    """`run` is what is timed; `read` makes its answer ours: (rows, hidden), or (tokens, hidden) where every step is wanted.

    right: what it is compared with where it is another computation than our layer; read() then gives what that asks for. extra:
    what is to be known of it besides its time, by names of `kernels.bench.report`.
    """

    run: Callable[[], Any]
    read: Callable[[Any], Tensor] = as_it_is
    right: Expected | None = None
    extra: Mapping[str, float] = field(default_factory=dict)


def everything(workload: Workload) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Peer:
    """`build` raises MissingError when the peer is not installed; `eager_only` says why it is not captured in a CUDA graph.

    `takes` keeps a peer that is slow, or made for one comparison, to the workloads where it tells something.
    """

    name: str
    build: Callable[[Given], Call]
    devices: tuple[str, ...] = ("cpu", "cuda")
    eager_only: str | None = None
    takes: Callable[[Workload], bool] = everything

    def is_asked(self, workload: Workload, device: str) -> bool:
        """device: cpu or cuda."""
        return device in self.devices and workload.kind not in OURS_ALONE and self.takes(workload)


def wanted(package: str, install: str) -> Any:
    """The package, imported only when its peer is built: it is optional, and some compile for half a minute when imported."""
    try:
        with warnings.catch_warnings():
            # Theirs are about their own insides and no fault of whoever compares with them.
            warnings.simplefilter("ignore")
            return import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingError(f"{install} ({type(error).__name__}: {str(error).splitlines()[0]})") from error


def pad(given: Given, at_least: int = 0) -> Tensor:
    """(longest, rows, inputs): time first, zeros after each row's end, at least so many steps."""
    padded = pad_sequence(list(torch.split(given.x.data, given.lengths)))
    missing = max(at_least - padded.shape[0], 0)
    return torch.nn.functional.pad(padded, (0, 0, 0, 0, 0, missing)).contiguous()


def last(given: Given) -> Callable[[Tensor], Tensor]:
    """Takes each row's last step out of (longest, rows, hidden)."""
    if not given.ragged:
        return lambda steps: steps[-1]
    device = given.x.data.device
    at = torch.tensor(given.lengths, device=device) - 1, torch.arange(len(given.lengths), device=device)
    return lambda steps: steps[at]
