"""gRPC calls by an independent implementation: gRPC for C++ in Triton's load generator, which `make test-all` installs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.scenarios import perf_analyzer
from tests.serving import Server, check_unharmed, eventually, serving

ROOT = Path(__file__).resolve().parents[2]
ANALYZER_CALLS = 500
"""The calls of one run of Triton's load generator."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(ROOT / "models", tmp_path_factory.mktemp("log")) as running:
        yield running


def test_cpp_client(served: Server, tmp_path: Path) -> None:
    """Triton's load generator calls with gRPC for C++: questions, and sessions in single calls and on streams."""
    if not perf_analyzer.BINARY.is_file():
        pytest.skip(f"{perf_analyzer.BINARY} is missing: `make test-all` installs it")
    cases = [
        case
        for case in perf_analyzer.cases(tmp_path, served.address, served.grpc, callers=[8])
        if case.protocol != perf_analyzer.REST
    ]
    before = served.metric("seqserve_requests_total", outcome="ok")
    for case in cases:
        # A fixed number of calls: a busy machine takes longer, and no figure has to be stable.
        figures = perf_analyzer.measure(case, tmp_path, "--request-count", str(ANALYZER_CALLS))
        assert figures is not None, f"{case.name} failed"
    eventually(lambda: served.metric("seqserve_requests_total", outcome="ok") - before >= len(cases) * ANALYZER_CALLS)
    check_unharmed(served)
