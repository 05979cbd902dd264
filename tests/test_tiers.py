"""The record of the tiers that passed, and the warnings of `make test`."""

from __future__ import annotations

import json
import subprocess
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiers import TIERS, main, warnings

TODAY = date(2026, 5, 20)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "tiers.json"


@pytest.fixture
def gpu_record(tmp_path: Path) -> Path:
    file = tmp_path / "passed.json"
    file.write_text('{"date": "2026-05-19"}')
    return file


def test_every_tier_is_a_folder() -> None:
    assert all((Path(__file__).parent / tier).is_dir() for tier in TIERS)


@pytest.mark.parametrize("text", [None, "{}", "[]", "<<<<<<< ours", '{"long": "yesterday"}'])
def test_tier_without_a_record_is_named(text: str | None, record: Path, gpu_record: Path) -> None:
    if text is not None:
        record.write_text(text)
    lines = warnings(record, gpu_record, TODAY)
    assert len(lines) == 3
    assert "tests/long" in lines[0] and "`make test-long`" in lines[0]
    assert "tests/docker" in lines[1] and "`make docker-test`" in lines[1]
    assert "tests/cluster" in lines[2] and "`make cluster-test`" in lines[2]


def test_tier_is_named_after_more_than_a_week(record: Path, gpu_record: Path) -> None:
    record.write_text('{"long": "2026-05-13", "docker": "2026-05-12", "cluster": "2026-05-13"}')
    [line] = warnings(record, gpu_record, TODAY)
    assert "tests/docker last passed on 2026-05-12" in line
    assert len(warnings(record, gpu_record, date(2026, 5, 27))) == 4, "the GPU's record is a week old as well"


def test_warnings_go_to_stderr_and_change_no_status(record: Path, gpu_record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stale"], record, gpu_record, TODAY) == 0
    printed = capsys.readouterr()
    assert not printed.out
    assert len(printed.err.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "status", "recorded"),
    [(["long"], 0, True), (["long"], 1, False), (["long", "-k", "reloads"], 0, False)],
    ids=["passes", "fails", "a part"],
)
def test_only_a_whole_tier_that_passes_is_recorded(
    arguments: list[str], status: int, recorded: bool, record: Path, gpu_record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.write_text('{"docker": "2026-05-01"}')
    monkeypatch.setattr(subprocess, "run", lambda _: SimpleNamespace(returncode=status))
    assert main(arguments, record, gpu_record, TODAY) == status
    expected = {"docker": "2026-05-01"} | ({"long": "2026-05-20"} if recorded else {})
    assert json.loads(record.read_text()) == expected
