"""The figures of recorded scrapes, and of scrapes around a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.metrics import Metrics, render
from service.top.figures import SERIES, STAGES, Levels, Rates
from service.top.scrape import Change, Scrape
from tests.serving import Server
from tests.top import recorded_scrapes as recorded


def scraped(metrics: Metrics, at: float) -> Scrape:
    return Scrape.parse(render(metrics.snapshot()).decode(), at)


def test_levels_are_those_of_the_scrape() -> None:
    levels = Levels.of(recorded.after())
    assert levels.ready
    assert (levels.engines, levels.frontends, levels.restarts, levels.sessions) == (1, 1, 0, 11)
    assert levels.max_batch_sequences == 64
    assert levels.slots_used == 11


def test_rates_are_the_rise_in_a_second() -> None:
    change = Change(recorded.before(), recorded.after())
    rates = Rates.of(change)
    risen = recorded.after().total(SERIES.requests) - recorded.before().total(SERIES.requests)
    assert risen > 0
    assert rates.requests == pytest.approx(risen / recorded.SECONDS)
    assert rates.stages["total"].rate == pytest.approx(rates.requests), "each request has a total"
    assert rates.failed == 0, "the refusals are errors of clients"
    assert 0 < rates.engines[0].busy < 1


def test_stages_are_in_their_order_and_ascend_in_their_quantiles() -> None:
    stages = Rates.of(Change(recorded.before(), recorded.after())).stages
    assert tuple(stages) == STAGES
    for values in stages.values():
        assert values.p50 is not None and values.p99 is not None
        assert 0 < values.p50 <= values.p99


def test_unanswered_requests_are_listed_by_outcome() -> None:
    refusals = Rates.of(Change(recorded.before(), recorded.after())).refusals
    assert [refusal.outcome for refusal in refusals] == ["quota_exceeded", "unknown_model"]
    assert refusals[0].total == recorded.after().total(SERIES.quota_exceeded)


def test_refused_callers_are_listed_with_the_other_refusals() -> None:
    before, now = Metrics(), Metrics()
    now.denied.add("unauthorized", by=6)
    now.requests.add("words", "1", "overloaded", by=2)
    now.requests.add("words", "1", "ok", by=9)
    refusals = Rates.of(Change(scraped(before, 0.0), scraped(now, 2.0))).refusals
    assert refusals == [("unauthorized", 3.0, 6.0), ("overloaded", 1.0, 2.0)]


def test_traffic_is_listed_by_model_and_by_key() -> None:
    rates = Rates.of(Change(recorded.before(), recorded.after()))
    assert {model.model for model in rates.models} == {"words", "sensors", "unknown"}
    assert [model.latency.rate for model in rates.models] == sorted(
        (model.latency.rate for model in rates.models), reverse=True
    )
    keys = {key.key: key for key in rates.keys}
    assert {name: key.tenant for name, key in keys.items()} == {"shop": "sales", "till": "sales", "lab": "research"}
    assert keys["till"].refused > 0 == keys["shop"].refused


def test_sessions_that_move_between_replicas_are_counted() -> None:
    before, now = Metrics(), Metrics()
    now.moved_in.add(by=12)
    now.moved_out.add(by=4)
    now.session_moves.add("host", by=100)
    now.peers.set(2, "reachable")
    now.peers.set(1, "unreachable")
    rates, levels = Rates.of(Change(scraped(before, 0.0), scraped(now, 2.0))), Levels.of(scraped(now, 2.0))
    assert (rates.sessions_in, rates.sessions_out, levels.reachable_peers, levels.peers) == (6.0, 2.0, 2, 3)


def test_rates_after_a_restart_count_from_0() -> None:
    """The new process has counted less than the old process, and its scrape has fewer series."""
    began, later = Metrics(), Metrics()
    for metrics, count in (began, 100), (later, 8):
        metrics.requests.add("words", "1", "ok", by=count)
        metrics.stage_seconds.observe_often(0.002, count, "words", "1", "total")
    began.requests.add("words", "1", "overloaded", by=5)
    rates = Rates.of(Change(scraped(began, 0.0), scraped(later, 2.0)))
    assert rates.requests == 4
    assert rates.stages["total"].rate == 4
    assert rates.stages["queue"].p50 is None, "nothing was observed"
    assert not rates.refusals


def test_unchanged_scrapes_have_no_quantiles() -> None:
    before = recorded.before()
    rates = Rates.of(Change(before, replace(before, at=before.at + 1.0)))
    assert {values.p50 for values in rates.stages.values()} == {None}
    assert rates.requests == rates.tokens == 0


def test_stages_are_those_of_the_service(server: Server) -> None:
    server.infer("words", ["how far is the sea ?"])
    values = Scrape.parse(server.scrape(), 0.0).histograms(SERIES.stage_seconds)
    assert {dict(labels)["stage"] for labels in values} == set(STAGES)


def test_every_series_of_the_service_is_read(server: Server) -> None:
    """The names in a scrape match the names in `Metrics`."""
    now = Scrape.parse(server.scrape(), 0.0)
    for series in SERIES.ready, SERIES.in_flight, SERIES.channel_bytes, SERIES.backlog_seconds, SERIES.device_busy_seconds:
        assert now.has(series), series.name
    assert not now.has(SERIES.key_requests), "a service without keys"


def test_control_characters_do_not_reach_the_terminal() -> None:
    text = 'seqserve_requests_total{model="\x1b[31mred",version="1",outcome="ok"} 1.0\n'
    [(model,)] = Scrape.parse(text, 0.0).by(SERIES.requests, "model")
    assert model == "?[31mred"


@pytest.mark.parametrize("text", ["<!doctype html><p>no metrics", "seqserve_ready one", 'seqserve_ready{a="b" 1'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Scrape.parse(text, 0.0)
