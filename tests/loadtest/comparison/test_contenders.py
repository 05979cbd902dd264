"""Servers that cannot run are named with the reason, and every launch finds its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.comparison import contenders
from loadtest.comparison.contenders import SEQSERVE, SERVED, SERVERS, TRITON

BY_NAME = {server.name: server for server in SERVERS}


def test_server_that_is_not_installed_names_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "ENVIRONMENT", tmp_path)
    assert [name for name, server in BY_NAME.items() if server.why_skipped() is None] == [SEQSERVE]
    assert str(tmp_path / "install.log") in str(BY_NAME[TRITON].why_skipped())
    (tmp_path / "installed").touch()
    assert BY_NAME[TRITON].why_skipped() is None


def test_requirements_are_exact() -> None:
    lines = (contenders.BASELINES / "triton.txt").read_text().splitlines()
    assert len(lines) > 3 and all(line.startswith("#") or line.count("==") == 1 for line in lines)


def test_triton_gets_a_repository_and_its_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "ENVIRONMENT", tmp_path / "environment")
    program = tmp_path / "environment" / "lib" / "python3.11" / "site-packages" / "pytriton" / "tritonserver"
    stub = program / "python_backend_stubs" / "3.11" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.write_text("a program")
    launch = BY_NAME[TRITON].launch(tmp_path, 1, 2)
    assert (tmp_path / "backends" / "python" / stub.name).read_text() == "a program"
    config = (tmp_path / "repository" / SERVED / "config.pbtxt").read_text()
    assert "max_queue_delay_microseconds: 0" in config and "dims: [6]" in config
    assert launch.command[0] == str(program / "bin" / "tritonserver") and "--http-port=1" in launch.command
