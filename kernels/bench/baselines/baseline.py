"""Baselines, and helpers that they share: optional packages and padded batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pad_sequence

from kernels.bench.agreement import ExpectedAnswer, expected_answer
from kernels.bench.case import BenchCase, embedded_case
from kernels.bench.workload import ENCODER, NEXT_STEPS, WITHOUT_BASELINES, Workload


class MissingError(Exception):
    """A baseline is not available on this machine. The message says what to install."""


@dataclass(frozen=True, slots=True)
class TimedCall:
    """`run` is timed; `read` converts its answer to our layout: (rows, hidden), or (tokens, hidden) for every step.

    expected: the expected answer, if `run` computes another function than our layer.
    """

    run: Callable[[], Any]
    read: Callable[[Any], Tensor] = lambda answer: answer
    expected: ExpectedAnswer | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """A competitor of our kernels. `build` raises MissingError if it is not installed.

    eager_only: why it cannot be captured in a CUDA graph; condition: limits a baseline that is slow, or made for one comparison, to the
    workloads where it is useful; over_ids: it looks up an embedding of token ids, and runs the folded workloads and no others; encoders:
    it also runs several layers and both directions; states: it also starts rows from a state; slack: its error may be this many times what
    rounding explains.
    """

    name: str
    build: Callable[[BenchCase], TimedCall]
    devices: tuple[str, ...] = ("cpu", "cuda")
    eager_only: str | None = None
    condition: Callable[[Workload], bool] = lambda _: True
    over_ids: bool = False
    encoders: bool = False
    states: bool = False
    slack: float = 1.0

    def applies(self, workload: Workload, device: str) -> bool:
        """Return whether the baseline runs this workload on `device`, which is cpu or cuda."""
        takes_data = workload.kind not in WITHOUT_BASELINES and self.over_ids == (workload.kind == "folded")
        runs = {ENCODER: self.encoders, NEXT_STEPS: self.states}.get(workload.kind, True)
        return device in self.devices and takes_data and runs and self.condition(workload)


def optional_package(package: str, install: str) -> Any:
    """Import a package when its baseline is built: it is optional, and some compile code for half a minute during the import."""
    try:
        with warnings.catch_warnings():
            # Warnings about the internals of the package are not ours to fix.
            warnings.simplefilter("ignore")
            return import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingError(f"{install} ({type(error).__name__}: {str(error).splitlines()[0]})") from error


def pad(case: BenchCase, at_least: int = 0) -> Tensor:
    """Return (longest, rows, inputs), or (longest, rows) token ids, with at least this many steps: time first, zeros after each row."""
    padded = pad_sequence(list(torch.split(case.x.data, case.lengths)))
    missing = at_least - padded.shape[0]
    return functional.pad(padded, (0, 0, 0, 0, 0, missing)) if missing > 0 else padded


def embedded(case: BenchCase) -> tuple[BenchCase, Callable[[Any], Any], ExpectedAnswer | None]:
    """Return the layer that a baseline runs, a function from its padded or packed data to vectors, and its answer if it is not ours.

    Over token ids, the function looks up an embedding, and the layer runs over its vectors. Otherwise it changes nothing.
    """
    if case.workload.kind != "folded":
        return case, lambda data: data, None
    embedding, over_vectors = embedded_case(case)

    def vectors(ids: Any) -> Any:
        if isinstance(ids, PackedSequence):
            return ids._replace(data=functional.embedding(ids.data, embedding))
        return functional.embedding(ids, embedding)

    return over_vectors, vectors, expected_answer(over_vectors)


def last(case: BenchCase) -> Callable[[Tensor], Tensor]:
    """Return a function that takes the last step of each row from (longest, rows, hidden)."""
    if not case.ragged:
        return lambda steps: steps[-1]
    device = case.x.data.device
    at = torch.tensor(case.lengths, device=device) - 1, torch.arange(len(case.lengths), device=device)
    return lambda steps: steps[at]
