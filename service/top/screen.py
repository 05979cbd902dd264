"""Draws frames with rich. 80 x 24 characters have room for the stages, the levels and the first lines of each table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.top.figures import Levels, Quantiles, Rates
from service.top.units import count, per_second, seconds, share, size
from service.top.watch import Frame

HEAD_LINES = 3
SECTION_LINES = 2
"""The empty line above a table, and its header."""
RECENT_SECONDS = 60.0
"""How long a restart of the service is mentioned."""
NO_VALUE = "-"
LEFT_WIDTH, NUMBER_WIDTH, NAME_WIDTH = 38, 7, 36
GOOD, BAD, QUIET, HEADING = "green", "bold red", "dim", "bold"


class Section(NamedTuple):
    """A table below the figures."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def draw(frame: Frame, height: int | None = None) -> RenderableType:
    """Return a frame for a terminal of `height` lines, None for as many lines as there are figures."""
    head = [_state(frame), _summary(frame), _message(frame)]
    if frame.levels is None:
        return Group(*head)
    stages, levels = _stages(frame.rates), _levels(frame.levels, frame.rates)
    parts: list[RenderableType] = [*head, _side_by_side(stages, levels)]
    if frame.rates is not None:
        sections = list(_sections(frame.rates))
        rows = [len(section.rows) for section in sections]
        if height is not None:
            rows = allocated(rows, height - HEAD_LINES - max(stages.row_count + 1, levels.row_count))
        for section, shown in zip(sections, rows, strict=True):
            if shown:
                parts += [Text(), _table(section, shown)]
    return Group(*parts)


def allocated(rows: Sequence[int], room: int) -> list[int]:
    """Return how many rows of each section are shown in `room` lines. Sections get them in turn, and their header with the first."""
    shown = [0] * len(rows)
    while True:
        before = list(shown)
        for section, wanted in enumerate(rows):
            lines = 1 if shown[section] else 1 + SECTION_LINES
            if shown[section] < wanted and lines <= room:
                shown[section] += 1
                room -= lines
        if shown == before:
            return shown


def _state(frame: Frame) -> Text:
    if frame.error:
        state = ("no answer", BAD)
    elif frame.levels is None or not frame.levels.ready:
        state = ("not ready", BAD)
    else:
        state = ("ready", GOOD)
    return _line(("seqserve ", HEADING), frame.url, "  ", state)


def _summary(frame: Frame) -> Text:
    rates = frame.rates
    if rates is None:
        return Text()
    return _line(
        f"requests {per_second(rates.requests)}  ",
        (f"failed {per_second(rates.failed)}", BAD if rates.failed else ""),
        f"  sequences {per_second(rates.sequences)}  tokens {per_second(rates.tokens)}",
    )


def _message(frame: Frame) -> Text:
    if frame.error:
        shown = "" if frame.levels is None else f"; the levels are {seconds(frame.age_seconds)} old"
        return _line((f"{frame.error}{shown}; trying again", BAD))
    if frame.restarted_seconds is not None and frame.restarted_seconds < RECENT_SECONDS:
        return _line((f"the service was restarted {seconds(frame.restarted_seconds)} ago: its counters began again", BAD))
    return Text()


def _stages(rates: Rates | None) -> Table:
    table = _grid(("stage", "rate", "p50", "p99"), NUMBER_WIDTH)
    if rates is None:
        table.add_row(Text("rates follow", QUIET))
        return table
    for stage, values in rates.stages.items():
        name = Text(stage, HEADING if stage == "total" else "")
        table.add_row(name, count(values.rate), _seconds(values.p50), _seconds(values.p99))
    return table


def _levels(levels: Levels, rates: Rates | None) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style=HEADING, no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in _described(levels, rates):
        table.add_row(name, Text(value))
    return table


def _described(levels: Levels, rates: Rates | None) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each line next to the stages."""
    yield "in flight", count(levels.in_flight)
    yield "queue", f"{count(levels.waiting)} waiting, {count(levels.begun)} begun"
    yield "backlog", seconds(levels.backlog_seconds)
    if rates is not None:
        sequences, tokens = rates.batch_sequences, rates.batch_tokens
        yield "batches", f"{per_second(sequences.rate)}, {share(rates.by_graph)} by graph"
        yield "sequences", f"{_size(sequences)}, limit {count(levels.max_batch_sequences)}"
        yield "tokens", _size(tokens)
    ended = "" if rates is None else f", {per_second(rates.sessions_ended)} ended"
    yield "sessions", f"{count(levels.sessions)} open{ended}"
    moved = "" if rates is None else f", {per_second(rates.session_moves)} moved"
    yield "slots", f"{count(levels.slots_used)} of {count(levels.slots)}{moved}"
    if levels.peers:
        yield "peers", f"{count(levels.reachable_peers)} of {count(levels.peers)} answer"
        if rates is not None:
            yield "moved", f"{per_second(rates.sessions_in)} in, {per_second(rates.sessions_out)} out"
    yield "processes", f"{_number(levels.engines, 'engine')}, {_number(levels.frontends, 'frontend')}"
    yield "restarts", count(levels.restarts)
    if levels.device_bytes:
        yield "memory", f"{size(levels.device_bytes)} on devices"
        if rates is not None:
            yield "padding", f"{share(rates.padded)} of computed steps"
    for use in [] if rates is None else rates.engines:
        yield f"engine {use.engine}", f"{share(use.busy)} busy, backlog {seconds(use.backlog_seconds)}"


def _number(value: float, noun: str) -> str:
    return f"{count(value)} {noun}" if value == 1 else f"{count(value)} {noun}s"


def _sections(rates: Rates) -> Iterator[Section]:
    """Yield the tables below the figures, the most important first."""
    yield Section(
        "not answered",
        ("per second", "since the start"),
        [(refusal.outcome, per_second(refusal.rate), count(refusal.total)) for refusal in rates.refusals],
    )
    yield Section(
        "model",
        ("requests", "sequences", "tokens", "p50", "p99"),
        [
            (
                f"{model.model} {model.version}",
                per_second(model.latency.rate),
                per_second(model.sequences),
                per_second(model.tokens),
                _seconds(model.latency.p50),
                _seconds(model.latency.p99),
            )
            for model in rates.models
        ],
    )
    yield Section(
        "tenant and key",
        ("requests", "tokens", "beyond quota"),
        [
            (f"{key.tenant} {key.key}", per_second(key.requests), per_second(key.tokens), per_second(key.refused))
            for key in rates.keys
        ],
    )


def _table(section: Section, shown: int) -> Table:
    """Return the first rows of a section. Its title counts them if there are more."""
    hidden = f" ({shown} of {len(section.rows)})" if shown < len(section.rows) else ""
    table = _grid((section.title + hidden, *section.columns))
    for name, *values in section.rows[:shown]:
        table.add_row(Text(name), *values)
    return table


def _grid(columns: tuple[str, ...], number_width: int | None = None) -> Table:
    """Return a table without lines. Its first column has names, the others have numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=HEADING)
    table.add_column(columns[0], no_wrap=True, overflow="ellipsis", max_width=NAME_WIDTH)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True, min_width=number_width)
    return table


def _side_by_side(left: Table, right: Table) -> Table:
    both = Table.grid(padding=(0, 2, 0, 0))
    both.add_column(width=LEFT_WIDTH)
    both.add_column()
    both.add_row(left, right)
    return both


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _seconds(value: float | None) -> str:
    if value is None:
        return NO_VALUE
    return seconds(value)


def _size(values: Quantiles) -> str:
    """Return the mean and the 99th percentile of whole numbers."""
    if values.mean is None or values.p99 is None:
        return NO_VALUE
    return f"mean {values.mean:.1f}, p99 {values.p99 if math.isinf(values.p99) else math.ceil(values.p99)}"
