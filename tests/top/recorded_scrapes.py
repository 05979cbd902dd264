"""Two scrapes of a service with keys, under load, 1.7 seconds apart."""

from __future__ import annotations

from pathlib import Path

from service.top.scrape import Scrape

HERE = Path(__file__).parent / "recorded"
SECONDS = 1.7


def before() -> Scrape:
    return Scrape.parse((HERE / "before.txt").read_text(), at=100.0)


def after() -> Scrape:
    return Scrape.parse((HERE / "after.txt").read_text(), at=100.0 + SECONDS)
