"""The log: one line an event, and no event that ends the process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.log import CAP_SECONDS, MAX_CAPPED_LINES, Log


@pytest.fixture
def descriptor() -> Iterator[int]:
    """A descriptor that tests point at other files."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


def point(descriptor: int, file: Path) -> None:
    opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(opened, descriptor)
    os.close(opened)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_dropped_lines_are_counted_when_the_stream_works_again(descriptor: int, tmp_path: Path) -> None:
    log, file = Log("test", descriptor), tmp_path / "log"
    read_end, write_end = os.pipe()
    os.close(read_end)
    os.dup2(write_end, descriptor)
    os.close(write_end)
    log.info("lost", number=0)
    point(descriptor, Path("/dev/full"))
    for number in (1, 2):
        log.info("lost", number=number)
    point(descriptor, file)
    log.error("written", number=3)
    log.info("written", number=4)
    assert [(line["event"], line.get("lines"), line.get("number")) for line in lines(file)] == [
        ("log lines dropped", 3, None),
        ("written", None, 3),
        ("written", None, 4),
    ]
    assert {line["process"] for line in lines(file)} == {"test"}


def test_line_torn_by_a_full_disk_does_not_swallow_the_next(
    descriptor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, file, write = Log("test", descriptor), tmp_path / "log", os.write
    point(descriptor, file)
    room = 30

    def write_until_full(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError("full")
        written, room = write(descriptor, data[:room]), 0
        return written

    with monkeypatch.context() as full:
        full.setattr(os, "write", write_until_full)
        log.info("torn")
    log.info("written")
    torn, *whole = file.read_text().splitlines()
    assert len(torn) == 30
    assert [json.loads(line)["event"] for line in whole] == ["log lines dropped", "written"]


def test_value_without_a_text_raises_nothing_and_none_forges_a_line(descriptor: int, tmp_path: Path) -> None:
    class Broken:
        def __str__(self) -> str:
            raise ValueError

    point(descriptor, tmp_path / "log")
    Log("test", descriptor).info("written", broken=Broken(), text='a\n{"event": "forged"}')
    [line] = lines(tmp_path / "log")
    assert (line["event"], line["broken"], line["log_error"]) == ("written", None, "ValueError")


def test_clients_cannot_fill_the_log(descriptor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, log, file = 100.0, Log("frontend", descriptor), tmp_path / "log"
    monkeypatch.setattr("service.log.time.monotonic", lambda: now)
    point(descriptor, file)
    for number in range(1000):
        log.capped("info", "audit", number=number)
    for _ in range(3):
        log.capped("info", "other")
    now += CAP_SECONDS
    log.capped("info", "audit", number=1000)
    log.capped("info", "audit", number=1001)
    audits = [line for line in lines(file) if line["event"] == "audit"]
    assert [line["number"] for line in audits] == [*range(MAX_CAPPED_LINES), 1000, 1001]
    assert [line.get("left_out") for line in audits[-3:]] == [None, 1000 - MAX_CAPPED_LINES, None]
    assert sum(line["event"] == "other" for line in lines(file)) == 3
