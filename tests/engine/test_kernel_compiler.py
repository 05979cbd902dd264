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


def compiler(monkeypatch: pytest.MonkeyPatch, reasons: list[str | None], status: int = 0) -> list[list[str]]:
    """Replace the compiler by a command that ends with a status; return the commands. reasons: what `missing` returns in turn."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, status, stderr="no space left on device\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(kernel_compiler, "missing", lambda: reasons.pop(0))
    return commands


@pytest.mark.parametrize(
    ("reasons", "status", "events"),
    [
        ([None], 0, []),
        ([NOT_COMPILED, None], 0, ["warning: cpu kernels not compiled", "info: cpu kernels compiled"]),
        ([NOT_COMPILED], 1, ["warning: cpu kernels not compiled", "error: cpu kernels not compiled"]),
        (["the folder of compiled kernels cannot be written: set SEQSERVE_CACHE"], 0, ["warning: cpu kernels not compiled"]),
    ],
    ids=["compiled", "missing", "compiler fails", "cannot be kept"],
)
def test_missing_kernels_are_compiled_for_the_next_start(
    reasons: list[str | None], status: int, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, log = compiler(monkeypatch, reasons.copy(), status), Events()
    kernel_compiler.compile_in_background(log)
    eventually(lambda: len(log.events) == len(events))
    assert [event for event, _ in log.events] == events
    assert [command[1:] for command in commands] == [["-m", "kernels.cpu", "--low-priority"]] * (NOT_COMPILED in reasons)
    assert status == 0 or log.events[1][1] == {"reason": "no space left on device"}
