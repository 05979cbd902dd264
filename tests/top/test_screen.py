"""Frames fit into a terminal and show the state of the service."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from service.top import units
from service.top.figures import Levels, Rates
from service.top.scrape import Change
from service.top.screen import allocated, draw
from service.top.watch import Frame
from tests.top import recorded_scrapes as recorded

URL = "http://127.0.0.1:8000"


def frame(**values: object) -> Frame:
    shown = {"levels": Levels.of(recorded.after()), "rates": Rates.of(Change(recorded.before(), recorded.after())), **values}
    return Frame(URL, **shown)  # type: ignore[arg-type] # the names are those of its fields


def drawn(shown: Frame, width: int = 80, height: int | None = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(draw(shown, height))
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
def test_frame_fits_into_the_terminal(width: int, height: int) -> None:
    lines = drawn(frame(), width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_nothing_is_cut_off_in_80_columns() -> None:
    assert "…" not in "".join(drawn(frame(), height=None))


def test_small_terminal_shows_the_first_rows_of_each_table() -> None:
    text = "\n".join(drawn(frame(), height=24))
    assert "quota_exceeded" in text
    assert "model (1 of 3)" in text or "model (2 of 3)" in text
    assert len(drawn(frame(), height=None)) > 24
    assert all(
        name in "\n".join(drawn(frame(), height=None)) for name in ("sales till", "research lab", "sensors 1", "words 1")
    )


@pytest.mark.parametrize(
    ("rows", "room", "shown"),
    [
        ([3, 2], 2, [0, 0]),
        ([3, 2], 3, [1, 0]),
        ([3, 2], 6, [1, 1]),
        ([3, 2], 7, [2, 1]),
        ([3, 2], 99, [3, 2]),
        ([0, 2], 3, [0, 1]),
        ([], 5, []),
    ],
    ids=str,
)
def test_rows_are_allocated_in_turn(rows: list[int], room: int, shown: list[int]) -> None:
    assert allocated(rows, room) == shown


def test_frame_without_rates_shows_the_levels() -> None:
    text = "\n".join(drawn(frame(rates=None)))
    assert "11 open" in text and "rates follow" in text


def test_moved_sessions_are_shown_beside_peers() -> None:
    alone, shown = "\n".join(drawn(frame())), frame()
    assert "peers" not in alone and "/s in" not in alone
    assert shown.levels is not None and shown.rates is not None
    levels = replace(shown.levels, peers=3.0, reachable_peers=2.0)
    rates = replace(shown.rates, sessions_in=12_345.0, sessions_out=23_456.0)
    lines = drawn(frame(levels=levels, rates=rates))
    assert any("2 of 3 answer" in line for line in lines)
    assert any("12.3 k/s in, 23.5 k/s out" in line for line in lines)


def test_service_that_does_not_answer_is_named() -> None:
    lines = drawn(Frame(URL, error="Connection refused"))
    assert lines[0] == f"seqserve {URL}  no answer"
    assert "Connection refused; trying again" in lines[2]
    [message] = [line for line in drawn(frame(error="timed out", age_seconds=12.0)) if "timed out" in line]
    assert "the levels are 12.0 s old" in message


def test_restart_is_mentioned_for_a_minute() -> None:
    assert any("restarted 5.00 s ago" in line for line in drawn(frame(restarted_seconds=5.0)))
    assert not any("restarted" in line for line in drawn(frame(restarted_seconds=61.0)))


def test_names_are_not_read_as_markup() -> None:
    shown = frame()
    assert shown.rates is not None
    shown.rates.models[0] = shown.rates.models[0]._replace(model="[bold]x[/bold]")
    assert "[bold]x[/bold] 1" in "\n".join(drawn(shown, height=None))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.count(0), "0"),
        (units.count(9_999), "9,999"),
        (units.count(12_345), "12.3 k"),
        (units.count(2_500_000), "2.50 M"),
        (units.per_second(0), "0/s"),
        (units.per_second(0.4), "0.4/s"),
        (units.per_second(1_234), "1,234/s"),
        (units.seconds(35e-6), "35 us"),
        (units.seconds(0.00125), "1.25 ms"),
        (units.seconds(0.25), "250 ms"),
        (units.seconds(3.2), "3.20 s"),
        (units.seconds(4_000), "4,000 s"),
        (units.seconds(math.inf), "> 10 s"),
        (units.size(0), "0 B"),
        (units.size(1.5 * 2**30), "1.50 GiB"),
        (units.share(0.834), "83 %"),
    ],
)
def test_numbers_have_few_characters(text: str, expected: str) -> None:
    assert text == expected
