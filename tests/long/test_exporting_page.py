"""The program of the page about exports prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import BLOCK, PAGES, run


def test_program_exports_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    [program] = [code for language, code in BLOCK.findall(PAGES["docs/exporting.md"]) if language == "python"]
    assert run(program, capsys)
