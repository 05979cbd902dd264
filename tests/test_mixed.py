"""The traffic of the long tests: its content, and that it detects a wrong status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest

from tests import mixed, models
from tests.mixed import IMPATIENCE_SECONDS, MOST_INPUTS, ROUND, Asked
from tests.serving import Server, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models of every head."""
    root = tmp_path_factory.mktemp("models")
    for make in models.OF_EVERY_HEAD.values():
        make(root)
    return root


def first(requests: Iterator[Asked], rounds: int = 1) -> list[Asked]:
    return list(islice(requests, rounds * ROUND))


def bodies(asked: list[Asked]) -> list[dict[str, Any]]:
    """Return the bodies of requests that are answered."""
    return [json.loads(one.body) for one in asked if one.status == 200]


def lengths(body: dict[str, Any]) -> list[int]:
    return [len(one.split() if isinstance(one, str) else one) for one in body["inputs"]]


def test_seed_determines_the_requests(folder: Path) -> None:
    one, same, other = (first(mixed.mixed(folder, seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_rounds_differ_only_in_content(folder: Path) -> None:
    asked = first(mixed.mixed(folder), rounds=2)
    one, other = asked[:ROUND], asked[ROUND:]
    assert [(said.status, said.patience_seconds) for said in one] == [(said.status, said.patience_seconds) for said in other]
    for before, after in zip(bodies(one), bodies(other), strict=True):
        assert (before["model"], lengths(before), before.get("return")) == (after["model"], lengths(after), after.get("return"))
    assert len({one.body for one in asked}) > 0.9 * len(asked)


def test_round_has_requests_of_every_kind(folder: Path) -> None:
    asked = first(mixed.mixed(folder))
    answered = bodies(asked)
    assert {body["model"] for body in answered} == set(models.OF_EVERY_HEAD)
    assert {len(body["inputs"]) for body in answered} == set(range(1, MOST_INPUTS + 1))
    assert {name for body in answered for name in body.get("return", ())} == {"embedding", "sequence"}
    assert {one.status for one in asked} == {200, 400, 404, 413}
    assert 0 < sum(one.patience_seconds <= IMPATIENCE_SECONDS for one in asked) < ROUND / 20


def test_input_lengths_cover_the_range_and_are_mostly_short(folder: Path) -> None:
    steps = sorted(steps for body in bodies(first(mixed.plain(folder))) if body["model"] == "words" for steps in lengths(body))
    assert (steps[0], steps[-1]) == (1, 64)
    assert steps[len(steps) // 2] < 16


def test_plain_requests_have_no_options_and_are_answered(folder: Path) -> None:
    asked = first(mixed.plain(folder))
    assert {one.status for one in asked} == {200}
    assert not any(one.impatient for one in asked)
    assert {tuple(body) for body in bodies(asked)} == {("model", "version", "inputs")}


def test_every_request_gets_its_expected_status(folder: Path, tmp_path: Path) -> None:
    heard: list[int] = []
    with serving(folder, tmp_path, "--device", "cpu") as server:
        mixed.send(server.address, mixed.mixed(folder), rounds=1, callers=8, after_round=heard.append)
        outcomes = [server.metric("seqserve_requests_total", outcome=outcome) for outcome in ("invalid_input", "unknown_model")]
    assert heard == [ROUND]
    assert all(outcomes)


@pytest.mark.parametrize("asked", [Asked(b"how far", status=400), Asked(b"how far", patience_seconds=0)])
def test_unexpected_status_is_detected(server: Server, asked: Asked) -> None:
    """A question without JSON around it has the status 400."""
    mixed.send(server.address, repeat(asked), rounds=1, callers=4)
    with pytest.raises(AssertionError, match=r"400 .+invalid_request.+, not 200, to b'how far'"):
        mixed.send(server.address, repeat(Asked(b"how far")), rounds=1, callers=4)
