"""The figures of `seqserve top`, computed from two scrapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from service.metrics import FAULTS, OK, Metrics
from service.top.quantiles import Distribution
from service.top.scrape import Change, Scrape

SERIES = Metrics()
"""The names of all metrics."""
STAGES = ("parse", "channel", "queue", "stage_in", "device_wait", "compute", "stage_out", "reply", "encode", "total")
"""The stages in order; the total includes the others."""


class Quantiles(NamedTuple):
    """Quantiles of some values, None without values; infinite above the largest bucket. rate: values per second."""

    rate: float
    mean: float | None
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Distribution, seconds: float) -> Quantiles:
        return cls(values.count / seconds, values.mean, values.quantile(0.5), values.quantile(0.99))


class Refusal(NamedTuple):
    """Requests with an outcome other than an answer. total: since the start of the service."""

    outcome: str
    rate: float
    total: float


class EngineUse(NamedTuple):
    """busy: share of the time in which its device ran batches. backlog_seconds: predicted time of its work."""

    engine: str
    busy: float
    backlog_seconds: float


class ModelTraffic(NamedTuple):
    """Of one model version. latency: in seconds, of all its requests."""

    model: str
    version: str
    sequences: float
    tokens: float
    latency: Quantiles


class KeyTraffic(NamedTuple):
    """Of one key, per second. refused: beyond a quota."""

    tenant: str
    key: str
    requests: float
    tokens: float
    refused: float


@dataclass(frozen=True, slots=True)
class Levels:
    """The figures of one scrape. peers: other replicas, 0 for a service without peers; reachable_peers: the peers that answer."""

    ready: bool
    in_flight: float
    waiting: float
    begun: float
    backlog_seconds: float
    max_batch_sequences: float
    sessions: float
    peers: float
    reachable_peers: float
    slots_used: float
    slots: float
    engines: float
    frontends: float
    restarts: float
    device_bytes: float

    @classmethod
    def of(cls, scrape: Scrape) -> Levels:
        processes = scrape.by(SERIES.processes, "process")
        return cls(
            ready=scrape.total(SERIES.ready) > 0,
            in_flight=scrape.total(SERIES.in_flight),
            waiting=scrape.total(SERIES.queue_depth),
            begun=scrape.total(SERIES.sequences_begun),
            backlog_seconds=max(scrape.values(SERIES.backlog_seconds).values(), default=0.0),
            max_batch_sequences=scrape.total(SERIES.max_batch_sequences),
            sessions=scrape.total(SERIES.sessions),
            peers=scrape.total(SERIES.peers),
            reachable_peers=scrape.total(SERIES.peers, state="reachable"),
            slots_used=scrape.total(SERIES.state_slots_used),
            slots=scrape.total(SERIES.state_slots),
            engines=processes.get(("engine",), 0.0),
            frontends=processes.get(("frontend",), 0.0),
            restarts=scrape.total(SERIES.restarts),
            device_bytes=scrape.total(SERIES.device_reserved_bytes),
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """The figures of two scrapes, per second.

    padded: share of the computed time steps that no sequence needed; by_graph: share of batches; session_moves: between device and host;
    sessions_in, sessions_out: sessions that came from other replicas, and that other replicas took.
    """

    requests: float
    failed: float
    sequences: float
    tokens: float
    padded: float
    by_graph: float
    sessions_ended: float
    session_moves: float
    sessions_in: float
    sessions_out: float
    stages: dict[str, Quantiles]
    batch_sequences: Quantiles
    batch_tokens: Quantiles
    refusals: list[Refusal] = field(default_factory=list)
    engines: list[EngineUse] = field(default_factory=list)
    models: list[ModelTraffic] = field(default_factory=list)
    keys: list[KeyTraffic] = field(default_factory=list)

    @classmethod
    def of(cls, change: Change) -> Rates:
        seconds = change.seconds
        stages = change.observed(SERIES.stage_seconds, "stage")
        tokens, padded = change.rate(SERIES.tokens), change.rate(SERIES.padded_tokens)
        batches = change.rate(SERIES.batches)
        return cls(
            requests=change.rate(SERIES.requests),
            failed=sum(change.rate(SERIES.requests, outcome=outcome) for outcome in FAULTS),
            sequences=change.rate(SERIES.sequences),
            tokens=tokens,
            padded=_share(padded, tokens + padded),
            by_graph=_share(change.rate(SERIES.batches, by="graph"), batches),
            sessions_ended=change.rate(SERIES.sessions_ended),
            session_moves=change.rate(SERIES.session_moves),
            sessions_in=change.rate(SERIES.moved_in),
            sessions_out=change.rate(SERIES.moved_out),
            stages={stage: Quantiles.of(stages.get((stage,), Distribution()), seconds) for stage in STAGES},
            batch_sequences=Quantiles.of(_all(change.observed(SERIES.batch_sequences)), seconds),
            batch_tokens=Quantiles.of(_all(change.observed(SERIES.batch_tokens)), seconds),
            refusals=_refusals(change),
            engines=_engines(change),
            models=_models(change),
            keys=_keys(change),
        )


def _refusals(change: Change) -> list[Refusal]:
    """Return the requests without an answer since the start of the service, the most frequent outcome first.

    A request whose key, host or origin is refused counts as denied, and not as an inference request.
    """
    refusals: list[Refusal] = []
    for counter, label in (SERIES.requests, "outcome"), (SERIES.denied, "reason"):
        rates = change.rates(counter, label)
        refusals += [Refusal(key[0], rates[key], total) for key, total in change.now.by(counter, label).items()]
    shown = [refusal for refusal in refusals if refusal.total and refusal.outcome != OK]
    return sorted(shown, key=lambda refusal: (-refusal.rate, -refusal.total, refusal.outcome))


def _engines(change: Change) -> list[EngineUse]:
    busy = change.rates(SERIES.device_busy_seconds, "engine")
    backlogs = change.now.by(SERIES.backlog_seconds, "engine")
    return [EngineUse(key[0], min(1.0, busy.get(key, 0.0)), backlog) for key, backlog in sorted(backlogs.items())]


def _models(change: Change) -> list[ModelTraffic]:
    """Return the traffic of every model version that had requests since the start of the service, the most requests first."""
    sequences = change.rates(SERIES.sequences, "model", "version")
    tokens = change.rates(SERIES.tokens, "model", "version")
    latencies = {
        (model, version): Quantiles.of(values, change.seconds)
        for (model, version, stage), values in change.observed(SERIES.stage_seconds, "model", "version", "stage").items()
        if stage == "total"
    }
    models = [ModelTraffic(*key, sequences.get(key, 0.0), tokens.get(key, 0.0), latency) for key, latency in latencies.items()]
    return sorted(models, key=lambda model: (-model.latency.rate, model.model, model.version))


def _keys(change: Change) -> list[KeyTraffic]:
    """Return the traffic of every key that sent requests since the start of the service, the most tokens first."""
    requests = change.rates(SERIES.key_requests, "tenant", "key")
    tokens = change.rates(SERIES.key_tokens, "tenant", "key")
    refused = change.rates(SERIES.quota_exceeded, "tenant", "key")  # of all its quotas together
    keys = [
        KeyTraffic(tenant, key, rate, tokens.get((tenant, key), 0.0), refused.get((tenant, key), 0.0))
        for (tenant, key), rate in requests.items()
    ]
    return sorted(keys, key=lambda key: (-key.tokens, key.tenant, key.key))


def _all(observed: dict[tuple[str, ...], Distribution]) -> Distribution:
    return observed.get((), Distribution())


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
