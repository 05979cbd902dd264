"""The parts of the simulation. Each yields records: plain values with units in their names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loadtest.fleet import hashing, machines, states
from loadtest.fleet.autoscaling import Policy, Trace, run
from loadtest.fleet.hashing import Hashing, Keys, Moves, Replicas
from loadtest.fleet.machines import Machine
from loadtest.fleet.sizing import Load, replicas_for

Record = dict[str, Any]
REPLICAS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
STATELESS = "text"
MORE_SESSIONS = 4
UPDATE_MOVES = 2
"""Moves of each session in a rolling update: to a new replica, and away from an old replica."""
ROLLING_SAMPLES = 2
"""Steps of a rolling update that are computed; the other steps move the same number of sessions on average."""
DAY_SECONDS = 24 * 3600
TROUGH = 0.3
"""Load at night as a share of the load at noon."""
SPIKE, SPIKE_AT, SPIKE_SECONDS = 1.5, 15 * 3600, 600
"""For ten minutes in the afternoon, half as many sequences again arrive from one second to the next."""
ZONE_LOST_AT = 11 * 3600
DAYS = {"usual day": (), "zone lost": (ZONE_LOST_AT,)}
"""The seconds at which a zone is lost."""
POLICIES = (
    Policy("backlog 0.2 s"),
    Policy("backlog 0.02 s", backlog_target=0.02),
    Policy("busy 0.6", backlog_target=None, busy_target=0.6),
    Policy("backlog 0.02 s or busy 0.6", backlog_target=0.02, busy_target=0.6),
)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What is simulated: the load, numbers of replicas, machines with their prices, and the seed of the session names.

    checkpoint: chunks between two copies of a session's state elsewhere; waiting: SEQSERVE_MAX_WAITING; autoscaled: machine and kind of
    request whose replicas the autoscalers add and remove.
    """

    load: Load
    replicas: Sequence[int] = REPLICAS
    prices: tuple[tuple[str, float], ...] = tuple((name, 1.0) for name in machines.SOURCES)
    checkpoint: int = 100
    waiting: int = 1024
    autoscaled: tuple[str, str] = ("2-core CPU", "socket-binary")
    seed: int = 0

    def records(self, days: bool = True) -> Iterator[Record]:
        """Yield the records of all parts. The records of whole days, which take the longest, come only if `days`."""
        keys = hashing.keys(self.load.streams, self.seed)
        for count in self.replicas:
            for proxy in hashing.HASHINGS:
                yield self.spread(proxy, count, keys)
        yield from self.failures()
        if days:
            yield from self.autoscaling()
        yield from self.machines()

    def spread(self, proxy: Hashing, count: int, keys: Keys) -> Record:
        """Return the sessions of the mean and of the fullest replica, and how many move with each change."""
        before = np.arange(count)
        owners = proxy.owners(before, keys)
        most = int(np.bincount(owners, minlength=count).max())
        added, removed = self._added(proxy, before, owners, keys), self._removed(proxy, before, owners, keys)
        moved = self._rolling(proxy, count, keys)
        return {
            "part": "spread",
            "hashing": proxy.name,
            "replicas": count,
            "points": proxy.points(count),
            "sessions_mean": len(keys) / count,
            "sessions_most": most,
            "most_times_mean": round(most * count / len(keys), 3),
            "refused_sessions": int(np.maximum(np.bincount(owners) - self.load.max_sessions, 0).sum()),
            "added_moved": added.sessions,
            "added_others": added.others,
            "removed_moved": removed.sessions,
            "removed_others": removed.others,
            "rolling_moved": moved,
        }

    def _added(self, proxy: Hashing, before: Replicas, owners: Replicas, keys: Keys) -> Moves:
        new = np.array([len(before)])
        return hashing.moves(owners, proxy.owners(np.concatenate([before, new]), keys), new)

    def _removed(self, proxy: Hashing, before: Replicas, owners: Replicas, keys: Keys) -> Moves:
        """Remove the last replica. A single replica takes all sessions with it."""
        if len(before) == 1:
            return Moves(len(keys), 0)
        return hashing.moves(owners, proxy.owners(before[:-1], keys), before[-1:])

    def _rolling(self, proxy: Hashing, count: int, keys: Keys) -> int:
        """Return how many moves an update causes that alternately adds a new replica and removes an old replica."""
        steps = np.unique(np.linspace(0, count - 1, min(count, ROLLING_SAMPLES)).astype(int))
        moved = 0
        for step in steps:
            old, new = np.arange(step, count), np.arange(count, count + step + 1)
            sets = [np.concatenate(each) for each in ((old, new[:-1]), (old, new), (old[1:], new))]
            owners = [proxy.owners(each, keys) for each in sets]
            moved += int((owners[0] != owners[1]).sum() + (owners[1] != owners[2]).sum())
        return round(moved * count / len(steps))

    def failures(self) -> Iterator[Record]:
        """Yield the costs of a crash and of the loss of a zone, and the traffic of checkpoints, for each number of replicas and model."""
        load = self.load
        for count in self.replicas:
            for model, size in states.file_bytes().items():
                each = load.streams / count
                yield {
                    "part": "failures",
                    "replicas": count,
                    "model": model,
                    "state_bytes": size,
                    "crash_sessions": round(each),
                    "zone_sessions": round(load.streams / load.zones) if count >= load.zones else None,
                    "moved_mb_a_change": round(each * size / 1e6, 3),
                    "checkpoint_mb_a_second": round(load.rate / self.checkpoint * size / 1e6, 3),
                    "update_gb": round(UPDATE_MOVES * load.streams * size / 1e9, 3),
                    "chunks_lost_a_session": (self.checkpoint - 1) / 2,
                }

    def autoscaling(self) -> Iterator[Record]:
        """Yield a day of each policy, usual and with the loss of a zone before noon."""
        machine = machines.read(*self.autoscaled)
        offered = day(self.load.rate)
        for policy in POLICIES:
            target = policy.busy_target or self.load.utilisation
            started = math.ceil(offered[0] / machine.rate / target)
            for name, losses in DAYS.items():
                lost = dict.fromkeys(losses, 1 / self.load.zones)
                trace = run(machine, policy, offered, started, lost, self.waiting)
                yield self._day(name, policy, machine, trace)

    def _day(self, name: str, policy: Policy, machine: Machine, trace: Trace) -> Record:
        limit, changes = self.load.p99_ms / 1000, np.abs(np.diff(trace.ready))
        return {
            "part": "autoscaling",
            "day": name,
            "policy": policy.name,
            "machine": machine.name,
            "replicas_mean": round(float(trace.ready.mean()), 1),
            "replicas_most": int(trace.ready.max()),
            "busy_mean": round(float((trace.offered / (trace.ready * machine.rate)).mean()), 3),
            "changes": trace.changes,
            "sessions_moved": round(float((changes / np.maximum(trace.ready[1:], trace.ready[:-1])).sum() * self.load.streams)),
            "refused_share": round(float(trace.refused.sum() / trace.offered.sum()), 5),
            "seconds_beyond_p99": int((trace.p99 > limit).sum()),
        }

    def machines(self) -> Iterator[Record]:
        """Yield the replicas and the cost of each machine and kind of request, sessions with two limits of their number."""
        for name, price in self.prices:
            for request in machines.KINDS:
                machine = machines.read(name, request, price)
                if request == STATELESS:
                    yield self._needed(machine, replace(self.load, streams=0))
                else:
                    for times in (1, MORE_SESSIONS):
                        yield self._needed(machine, replace(self.load, max_sessions=times * self.load.max_sessions))

    def _needed(self, machine: Machine, load: Load) -> Record:
        needed = replicas_for(load, machine)
        return {
            "part": "machines",
            "machine": machine.name,
            "device": machine.device,
            "date": machine.date,
            "request": machine.request,
            "max_sessions": load.max_sessions if load.streams else None,
            "rate_closed": round(machine.rate),
            "rate_within_p99": round(machine.rate_within(load.p99_ms / 1000)),
            **{f"replicas_{bound}": count for bound, count in needed.items()},
            "streams_a_core": round(machine.rate_within(load.p99_ms / 1000) / machine.cores) if load.streams else None,
            "utilisation": round(load.rate / needed["total"] / machine.rate, 3),
            "price_an_hour": machine.price,
            "cost_a_million": round(needed["total"] * machine.price / (load.rate * 3600) * 1e6, 4),
        }


def day(noon_rate: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return sequences a second over a day: a sine between the night and noon, and a spike in the afternoon."""
    seconds = np.arange(DAY_SECONDS)
    share = (1 + TROUGH) / 2 - (1 - TROUGH) / 2 * np.cos(2 * np.pi * seconds / DAY_SECONDS)
    spike = (seconds >= SPIKE_AT) & (seconds < SPIKE_AT + SPIKE_SECONDS)
    return noon_rate * share * np.where(spike, SPIKE, 1.0)
