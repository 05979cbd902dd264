"""The goals of the comparison, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernels.bench.goals.limit import HEADING, Limit, Line
from loadtest.comparison.contenders import INFER, OIP_BINARY, OIP_GRPC, PLAIN, PREDICT, SEQSERVE, TRITON
from loadtest.comparison.measurements import FRONTEND, GENERATOR, NO_MODEL, P50, P99, Case, Measurements
from loadtest.comparison.models import CNN, LSTM, MODELS
from loadtest.scenarios.rounds import RATE

BUSY = (8, 32, 128)
OPEN_P99_MS = {1000: 1.5, 4000: 2.5, 10000: 5.0}
FRONTEND_US = {INFER.name: 22.0, OIP_BINARY.name: 22.0, OIP_GRPC.name: 30.0}
GENERATOR_US = 15.0


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit for a value of a case, or for its ratio to a base in the same round."""

    name: str
    limit: Limit
    case: Case
    column: str
    base: Case | None = None

    def line(self, measured: Measurements) -> Line:
        value = measured.median(self.case, self.column, self.base)
        if value is None:
            return self.name, "not measured", str(self.limit), "open"
        if self.case.rate and not measured.holds(self.case):
            return self.name, "beyond", str(self.limit), "missed"
        return self.limit.line(self.name, value)


def lines(measured: Measurements) -> list[Line]:
    """Return one line for each goal of the models that were measured."""
    models = {case.model for case in measured.cases()}
    return [HEADING, *(goal.line(measured) for goal in GOALS if goal.case.model in models)]


def _ours(model: str, endpoint: str, callers: int = 0, rate: int = 0) -> Case:
    return Case(model, SEQSERVE, endpoint, callers, rate)


def _goals() -> Iterator[Goal]:
    http = (INFER.name, OIP_BINARY.name)
    for endpoint in http:
        constant = Case(NO_MODEL, TRITON, OIP_BINARY.name, 32)
        name = f"{CNN}, {endpoint}, 32 callers: rate over {TRITON}'s constant answer"
        yield Goal(name, Limit(1.3), _ours(CNN, endpoint, 32), RATE, constant)
    for model in MODELS:
        plain = Case(model, PLAIN, PREDICT.name, 1)
        name = f"{model}, {INFER.name}, 1 caller: p50 over {PLAIN}'s"
        yield Goal(name, Limit(0.5, "times"), _ours(model, INFER.name, 1), P50, plain)
    for endpoint in http:
        for callers in BUSY:
            name, ours = f"{LSTM}, {endpoint}, {callers} callers", _ours(LSTM, endpoint, callers)
            triton = Case(LSTM, TRITON, OIP_BINARY.name, callers)
            yield Goal(f"{name}: rate over {TRITON}'s", Limit(1.6), ours, RATE, triton)
            yield Goal(f"{name}: p99 over {TRITON}'s", Limit(1, "times"), ours, P99, triton)
    for callers in BUSY:
        ours, triton = (Case(LSTM, server, OIP_GRPC.name, callers) for server in (SEQSERVE, TRITON))
        yield Goal(f"{LSTM}, gRPC, {callers} callers: rate over {TRITON}'s", Limit(1.6), ours, RATE, triton)
    for rate, limit_ms in OPEN_P99_MS.items():
        name = f"{LSTM}, {INFER.name}, {rate:,} a second: p99"
        yield Goal(name, Limit(limit_ms, "ms"), _ours(LSTM, INFER.name, rate=rate), P99)
    for model in MODELS:
        for endpoint, limit_us in FRONTEND_US.items():
            name = f"{model}, {endpoint}, 32 callers: frontend's CPU of an answer"
            yield Goal(name, Limit(limit_us, "us"), _ours(model, endpoint, 32), FRONTEND)
        name = f"{model}, {INFER.name}, 32 callers: generator's CPU of an answer"
        yield Goal(name, Limit(GENERATOR_US, "us"), _ours(model, INFER.name, 32), GENERATOR)


GOALS = tuple(_goals())
