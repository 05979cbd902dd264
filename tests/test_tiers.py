"""The record of the test files that passed, and the warnings of `make test`."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from tests import tiers
from tests.tiers import TIERS, files_of, main, warnings

TODAY = date(2026, 5, 20)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "tiers.json"


@pytest.fixture
def gpu_record(tmp_path: Path) -> Path:
    file = tmp_path / "passed.json"
    file.write_text('{"date": "2026-05-19"}')
    return file


@pytest.fixture
def passed() -> dict[str, dict[str, str]]:
    """A record in which all files passed a week ago."""
    return {f"tests/{tier}/{file.name}": {"date": "2026-05-13"} for tier in TIERS for file in files_of(tier)}


def test_every_tier_has_files() -> None:
    assert all(files_of(tier) for tier in TIERS)


@pytest.mark.parametrize("text", [None, "{}", "[]", "<<<<<<< ours", '{"tests/long/test_soak.py": "yesterday"}'])
def test_tier_without_a_record_is_named(text: str | None, record: Path, gpu_record: Path) -> None:
    if text is not None:
        record.write_text(text)
    lines = warnings(record, gpu_record, TODAY)
    assert lines == [f"warning: no record that tests/{tier} passed: run `{command}`" for tier, command in TIERS.items()]


def test_file_is_named_after_more_than_a_week(record: Path, gpu_record: Path, passed: dict[str, dict[str, str]]) -> None:
    record.write_text(json.dumps(passed))
    assert not warnings(record, gpu_record, TODAY)
    passed["tests/docker/test_stack.py"]["date"] = "2026-05-12"
    record.write_text(json.dumps(passed))
    [line] = warnings(record, gpu_record, TODAY)
    assert "tests/docker last passed on 2026-05-12, more than a week ago in test_stack.py:" in line
    assert len(warnings(record, gpu_record, date(2026, 5, 27))) == 4, "the GPU's record is a week old as well"


def test_file_without_a_record_is_named(record: Path, gpu_record: Path, passed: dict[str, dict[str, str]]) -> None:
    del passed["tests/long/test_soak.py"]
    record.write_text(json.dumps(passed))
    assert warnings(record, gpu_record, TODAY) == [
        "warning: no record that tests/long passed in test_soak.py: run `make test-long`"
    ]


def test_warnings_go_to_stderr_and_change_no_status(record: Path, gpu_record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stale"], record, gpu_record, TODAY) == 0
    printed = capsys.readouterr()
    assert not printed.out
    assert len(printed.err.splitlines()) == 3


@pytest.mark.parametrize(
    ("test", "status", "counts"),
    [
        ("def test_one(): pass\n@pytest.mark.skip('slow')\ndef test_two(): pass", 0, [1, 1]),
        ("def test_one(): pass\ndef test_two(): assert False", 1, None),
        ("@pytest.mark.skip('slow')\ndef test_one(): pass", 0, None),
        ("", 1, None),
    ],
    ids=["passes", "fails", "skips all", "has no tests"],
)
def test_only_a_file_that_passes_is_recorded(
    test: str, status: int, counts: list[int] | None, record: Path, gpu_record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = record.parent / "test_it.py"
    file.write_text(f"import pytest\n{test}\n")
    record.write_text('{"tests/long/test_soak.py": {"date": "2026-05-01"}}')
    monkeypatch.setattr(tiers, "ROOT", record.parent)
    monkeypatch.setattr(tiers, "_commit", lambda: "abcdef0")
    assert main(["long", str(file)], record, gpu_record, TODAY) == status
    recorded = json.loads(record.read_text())
    assert recorded.pop("tests/long/test_soak.py") == {"date": "2026-05-01"}
    if counts is None:
        assert not recorded
    else:
        proof = recorded["test_it.py"]
        assert (proof["date"], proof["commit"], [proof["passed"], proof["skipped"]]) == ("2026-05-20", "abcdef0", counts)
        assert proof["machine"]
