"""One workload after the other: its backends and peers agree with the reference, or are named and not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch

from kernels.backend import Backend, Problem, takes_everything
from kernels.bench import timing
from kernels.bench.agreement import DisagreesError, Expected, expected
from kernels.bench.baselines.baseline import Call, MissingError, Peer
from kernels.bench.given import Given, made_up
from kernels.bench.report import Row
from kernels.bench.workload import PEERS_ALONE, Workload
from kernels.contract import STORAGE


@dataclass(slots=True)
class Findings:
    """rows: what was timed; refused: why a backend of ours was not; left_out: why something else was not, each reason once;
    wrong: who disagreed or broke."""

    rows: list[Row] = field(default_factory=list)
    refused: dict[str, None] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Bench:
    """budget_s: seconds for each figure, as far as 10 repetitions fit into them; say: hears of the progress."""

    device: torch.device
    peers: Sequence[Peer]
    budget_s: float
    say: Callable[[str], None]

    def measured(self, workloads: Sequence[Workload]) -> Findings:
        findings = Findings()
        for done, workload in enumerate(workloads):
            self.say(f"{done + 1}/{len(workloads)} {workload}")
            self._measure(workload, findings)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # the next one's arrays have other sizes, and some take gigabytes
        return findings

    def _measure(self, workload: Workload, findings: Findings) -> None:
        # Weights are copied into layers outside of inference mode, as a layer made within it is not like those of users.
        with torch.no_grad():
            given = made_up(workload, self.device)
            right = expected(given) if given.weights else None
            for peer in self._contenders(workload, findings):
                self._one(peer, workload, given, right, findings)

    def _contenders(self, workload: Workload, findings: Findings) -> Iterator[Peer]:
        """Our own backends first, each as a peer whose layout is ours."""
        problem = Problem(self.device, STORAGE[workload.dtype], workload.outputs)
        backends: tuple[Backend, ...] = import_module(f"kernels.{workload.family}").BACKENDS
        for backend in () if workload.kind in PEERS_ALONE else backends:
            reason = backend.refuses(problem)
            if reason is None and _too_slow(backend, workload):
                line = f"{backend.name} is a last resort, timed up to 128 steps of 32 rows where there are many sizes"
                findings.left_out[line] = None
            elif reason is None:
                yield Peer(backend.name, partial(_ours, backend.name))
            elif backend.name != "reference":
                findings.refused[f"{backend.name} refuses: {reason}"] = None
        yield from (peer for peer in self.peers if peer.is_asked(workload, self.device.type))

    def _one(self, peer: Peer, workload: Workload, given: Given, ours: Expected | None, findings: Findings) -> None:
        try:
            call = peer.build(given)
            right = call.right or ours
            assert right is not None, "whoever is asked without a layer of ours brings a right answer"
            with torch.inference_mode():
                off = right.error(call.read(call.run()))
                for how, spread in self._timings(peer, workload, call, right, findings):
                    findings.rows.append(Row(workload, peer.name, how, spread, off, call.extra))
        except MissingError as error:
            findings.left_out[f"{peer.name} is left out: {error}"] = None
        except DisagreesError as error:
            findings.wrong.append(f"{peer.name} on {workload}: {error}")
        except Exception as error:  # one that breaks must not take the figures of the others along
            findings.wrong.append(f"{peer.name} on {workload}: {type(error).__name__}: {error}")

    def _timings(
        self, peer: Peer, workload: Workload, call: Call, right: Expected, findings: Findings
    ) -> Iterator[tuple[str, timing.Spread]]:
        """In a grid, a kernel's time is enough of whoever has one."""
        graph_alone = workload.in_grid and peer.eager_only is None and self.device.type == "cuda"
        if not graph_alone:
            yield "eager", timing.eager(call.run, self.device, self.budget_s)
        if self.device.type != "cuda":
            return

        def check(answer: Any) -> object:
            return right.error(call.read(answer))

        try:
            if peer.eager_only is not None:
                raise timing.NotCapturableError(peer.eager_only)
            yield "kernel", timing.kernel(call.run, check, self.budget_s)
            if not workload.in_grid:
                yield "replay", timing.replay(call.run, check, self.budget_s)
        except timing.NotCapturableError as error:
            findings.left_out[f"{peer.name} is timed eagerly only: {error}"] = None
            if graph_alone:
                yield "eager", timing.eager(call.run, self.device, self.budget_s)


def _too_slow(backend: Backend, workload: Workload) -> bool:
    """A grid has sizes for which a last resort takes seconds, nearly all of them the host's, and where nobody should meet it."""
    small = workload.steps <= 128 and workload.rows <= 32
    return workload.in_grid and not small and backend.refuses is takes_everything


def _ours(backend: str, given: Given) -> Call:
    return Call(given.encoder(backend))
