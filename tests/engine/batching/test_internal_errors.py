"""Unexpected exceptions in a batcher: they refuse their requests alone, and clients cannot fill the log with them."""

from __future__ import annotations

import pytest

from service.engine.batching.request_block import RequestBlock
from service.engine.execution.in_flight import BlockResult
from service.engine.internal_errors import MAX_KINDS, InternalErrors
from service.errors import SERVICE_FAILED, InferenceFailed
from service.log import Log
from service.metrics import Metrics
from tests.engine.batching.harness import BatcherHarness, counted


def test_kinds_of_logged_errors_are_limited(capfd: pytest.CaptureFixture[str]) -> None:
    errors = InternalErrors(Log("engine"), Metrics())
    for number in range(2 * MAX_KINDS):
        errors.log("bug", ValueError("x" * 10_000), work=str(number))
    logged = capfd.readouterr().err.splitlines()
    assert len(logged) == MAX_KINDS and len(logged[0]) < 1000


def test_block_whose_answer_raises_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = BatcherHarness()
    answer = harness.frontend.answer

    def fail_first(block: RequestBlock, result: BlockResult, ready: float) -> None:
        if block.ids[0] == 0:
            raise IndexError("secret")
        answer(block, result, ready)

    monkeypatch.setattr(harness.frontend, "answer", fail_first)
    bad, good = harness.call([1], [2]), harness.call([3])
    harness.run()
    [error] = bad.errors
    assert isinstance(error, InferenceFailed) and error.message == SERVICE_FAILED
    assert good.sums == [3.0]
    assert counted(harness.metrics.engine_errors) == {"answer": 1}
