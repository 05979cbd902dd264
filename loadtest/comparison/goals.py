"""The goals of the comparison, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from kernels.bench.goals.limit import HEADING, Limit, Line
from loadtest.comparison.contenders import INFER, OIP_BINARY, OIP_GRPC, SEQSERVE, TRITON
from loadtest.comparison.measurements import NO_MODEL, P99, Case, Measurements
from loadtest.comparison.models import CNN, LSTM, MODELS
from loadtest.requests import FRONTENDS, GENERATORS
from loadtest.scenarios.rounds import RATE

BUSY = (8, 32, 128)
OPEN_P99_MS = {1000: 1.5, 4000: 2.5, 10000: 5.0}
FRONTENDS_US = {INFER.name: 22.0, OIP_BINARY.name: 22.0, OIP_GRPC.name: 30.0}
GENERATORS_US = 15.0


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
    return [HEADING, *(goal.line(measured) for goal in _goals() if goal.case.model in models)]


def _goals() -> Iterator[Goal]:
    constant = Case(NO_MODEL, TRITON, OIP_BINARY.name, 32)
    for endpoint in (INFER.name, OIP_BINARY.name):
        name, ours = f"{CNN}, {endpoint}, 32 callers", Case(CNN, SEQSERVE, endpoint, 32)
        yield Goal(f"{name}: rate over {TRITON}'s constant answer", Limit(1.3), ours, RATE, constant)
    for (ours_at, tritons_at), callers in product(((INFER, OIP_BINARY), (OIP_BINARY, OIP_BINARY), (OIP_GRPC, OIP_GRPC)), BUSY):
        ours, triton = Case(LSTM, SEQSERVE, ours_at.name, callers), Case(LSTM, TRITON, tritons_at.name, callers)
        name = f"{LSTM}, {ours_at.name}, {callers} callers"
        yield Goal(f"{name}: rate over {TRITON}'s", Limit(1.6), ours, RATE, triton)
        yield Goal(f"{name}: p99 over {TRITON}'s", Limit(1, "times"), ours, P99, triton)
    for rate, limit_ms in OPEN_P99_MS.items():
        case = Case(LSTM, SEQSERVE, INFER.name, rate=rate)
        yield Goal(f"{LSTM}, {INFER.name}, {rate:,} a second: p99", Limit(limit_ms, "ms"), case, P99)
    for model, (endpoint, limit_us) in product(MODELS, FRONTENDS_US.items()):
        name, ours = f"{model}, {endpoint}, 32 callers", Case(model, SEQSERVE, endpoint, 32)
        yield Goal(f"{name}: frontend's CPU of an answer", Limit(limit_us, "us"), ours, FRONTENDS)
        if endpoint == INFER.name:
            yield Goal(f"{name}: generator's CPU of an answer", Limit(GENERATORS_US, "us"), ours, GENERATORS)
