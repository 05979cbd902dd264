"""The watch continues through failures and restarts of the service."""

from __future__ import annotations

import email.message
import io
from collections.abc import Iterator
from http.client import IncompleteRead
from urllib.error import HTTPError, URLError

import pytest

from service.client_access import KeyRefused
from service.metrics import Metrics, render
from service.top.scrape import Scrape
from service.top.watch import Frame, Watch

URL = "http://127.0.0.1:8000"


def scraped(requests: int, at: float) -> Scrape:
    metrics = Metrics()
    metrics.ready.set(1)
    metrics.accepted.add(by=requests)
    metrics.requests.add("words", "1", "ok", by=requests)
    return Scrape.parse(render(metrics.snapshot()).decode(), at)


def frames(*outcomes: Scrape | Exception) -> list[Frame]:
    """Return the frames of a service that answers with these scrapes and errors, one second apart."""
    left: Iterator[tuple[int, Scrape | Exception]] = enumerate(outcomes)
    moment = 0.0

    def scrape() -> Scrape:
        nonlocal moment
        second, outcome = next(left)
        moment = float(second)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    watch = Watch(URL, scrape, lambda: moment)
    return [watch.frame() for _ in outcomes]


def test_rates_come_with_the_second_scrape() -> None:
    first, second = frames(scraped(10, 0), scraped(40, 1))
    assert first.levels is not None and first.rates is None
    assert second.rates is not None and second.rates.requests == 30


def test_failure_keeps_the_levels_and_names_the_reason() -> None:
    _, _, failed, again, back = frames(
        scraped(10, 0),
        scraped(40, 1),
        URLError(ConnectionRefusedError(111, "Connection refused")),
        TimeoutError(),
        scraped(70, 4),
    )
    assert (failed.error, failed.age_seconds, failed.rates) == ("Connection refused", 1.0, None)
    assert failed.levels is not None and failed.levels.ready
    assert (again.error, again.age_seconds) == ("TimeoutError", 2.0)
    assert not back.error and back.rates is None, "the rates over the failure would mislead"
    assert back.restarted_seconds is None


def test_restart_is_noticed_by_counters_that_fell() -> None:
    *_, after, later = frames(scraped(100, 0), scraped(200, 1), OSError("away"), scraped(5, 3), scraped(9, 4))
    assert after.restarted_seconds == 0
    assert (later.restarted_seconds, later.rates and later.rates.requests) == (1.0, 4)


def test_service_that_never_answered_has_no_levels() -> None:
    [frame] = frames(OSError("Name or service not known"))
    assert frame.levels is None and frame.error == "Name or service not known"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (HTTPError(URL, 503, "", email.message.Message(), io.BytesIO(b'{"error": "not ready"}')), "not ready"),
        (HTTPError(URL, 404, "", email.message.Message(), io.BytesIO(b"<html>")), "status 404"),
        (IncompleteRead(b"abc"), "IncompleteRead(3 bytes read)"),
        (ValueError("no metrics\x1b[2J"), "no metrics?[2J"),
    ],
)
def test_reason_of_a_failure_is_short(error: Exception, reason: str) -> None:
    [frame] = frames(error)
    assert frame.error == reason


def test_refused_key_ends_the_watch() -> None:
    with pytest.raises(KeyRefused):
        frames(KeyRefused("name its file with --key-file"))
