"""An engine without compiled CPU kernels has them compiled in the background."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from kernels.cpu.cache import NOT_COMPILED
from service.engine import kernel_compiler
from service.log import Log
from tests.serving import eventually


class Events(Log):
    """Keeps the events instead of printing them."""

    def __init__(self) -> None:
        super().__init__("engine-0")
        self.events: list[tuple[str, dict[str, Any]]] = []

    def _write(self, level: str, event: str, values: dict[str, Any]) -> None:
        self.events.append((f"{level}: {event}", values))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Events:
    return Events()


def compiler(monkeypatch: pytest.MonkeyPatch, reasons: list[str | None], status: int = 0) -> list[list[str]]:
    """Replace the compiler by a command that ends with a status; return the commands. reasons: what `missing` returns in turn."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, status, stderr="no space left on device\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(kernel_compiler, "missing", lambda: reasons.pop(0))
    return commands


def test_compiled_kernels_are_not_compiled_again(log: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = compiler(monkeypatch, [None])
    kernel_compiler.compile_in_background(log)
    assert not commands and not log.events


def test_missing_kernels_are_compiled_for_the_next_start(log: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = compiler(monkeypatch, [NOT_COMPILED, None])
    kernel_compiler.compile_in_background(log)
    eventually(lambda: len(log.events) == 2)
    assert [event for event, _ in log.events] == ["warning: cpu kernels not compiled", "info: cpu kernels compiled"]
    assert [command[1:] for command in commands] == [["-m", "kernels.cpu", "--low-priority"]]


def test_failed_compiler_is_logged(log: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(monkeypatch, [NOT_COMPILED], status=1)
    kernel_compiler.compile_in_background(log)
    eventually(lambda: len(log.events) == 2)
    assert log.events[1] == ("error: cpu kernels not compiled", {"reason": "no space left on device"})


def test_nothing_is_compiled_where_it_cannot_be_kept(log: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = compiler(monkeypatch, ["the folder of compiled kernels cannot be written: set SEQSERVE_CACHE"])
    kernel_compiler.compile_in_background(log)
    assert not commands and [event for event, _ in log.events] == ["warning: cpu kernels not compiled"]
