"""`seqserve top` reads running services: one frame, a pipe, a terminal, keys, and a restart of the service."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.servers import free_port
from service import cli, settings
from service.access.keys import create
from service.access.scopes import Scope
from tests.serving import LIMIT_SECONDS, Server, answering, serving

BODY = {"model": "words", "inputs": ["how far is the sea ?", "who"]}


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.CLIENT_KEY, raising=False)


class Output:
    """Collects what a program writes to a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.text = ""

    def wait_for(self, pattern: str, start: int = 0) -> int:
        """Wait until the text behind `start` has the pattern. Returns where the match ends."""
        until = time.monotonic() + LIMIT_SECONDS
        while not (found := re.compile(pattern).search(self.text, start)):
            assert time.monotonic() < until, f"no {pattern!r} in {self.text!r}"
            if select.select([self._descriptor], [], [], 0.1)[0]:
                self.text += os.read(self._descriptor, 65536).decode()
        return found.end()


@contextmanager
def running_top(url: str, output: int, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `seqserve top` with its output in a file descriptor. At the end of the block an interrupt ends it."""
    command = [sys.executable, "-m", "service", "top", url, "--interval", "0.1"]
    with subprocess.Popen(
        command,
        stdout=output,
        stderr=output,
        stdin=subprocess.DEVNULL,
        env=os.environ | variables,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore interrupts
    ) as top:
        try:
            yield top
            top.send_signal(signal.SIGINT)
            assert top.wait(LIMIT_SECONDS) == 0
        finally:
            top.kill()


def test_once_prints_one_frame_of_plain_text(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    def frame(interval: str) -> str:
        assert cli.main(["top", server.address, "--once", "--interval", interval]) == 0
        return capsys.readouterr().out

    with answering(server, BODY):
        # A busy machine may answer nothing in a short interval.
        tries = map(frame, ("0.5", "5", "20"))
        printed = next(out for out in tries if re.search(r"^total +[1-9][\d,]* +[\d.]+ (us|ms|s) ", out, re.MULTILINE))
    assert printed.startswith(f"seqserve {server.address}  ready\nrequests ")
    assert re.search(r"^words 2 +[\d.,]+/s", printed, re.MULTILINE)
    assert "\x1b" not in printed and all(len(line) <= 80 for line in printed.splitlines())


def test_address_may_end_with_a_slash_or_the_path(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for end in "/", "/metrics":
        assert cli.main(["top", server.address + end, "--once", "--interval", "0.01"]) == 0
        assert capsys.readouterr().out.startswith(f"seqserve {server.address}  ready")


def test_once_without_a_service_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", f"http://127.0.0.1:{free_port()}", "--once"]) == 1
    assert "does not answer with metrics: Connection refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [(["localhost:8000"], "must begin with http"), (["--interval", "0"], "not a number above zero")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_flag_exits_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(["top", "--once", *words])
    except SystemExit as exit:
        status = int(str(exit.code))
    assert status == 2
    assert message in capsys.readouterr().err


def test_other_servers_are_refused(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", f"{server.address}/docs", "--once"]) == 1
    assert "does not answer with metrics" in capsys.readouterr().err


def test_key_comes_from_a_file_or_the_environment(
    models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, key_file, weak = tmp_path / "keys.toml", tmp_path / "key", tmp_path / "weak"
    key_file.write_text(create(keys, "watcher", [Scope.METRICS], "operators"))
    weak.write_text(create(keys, "reader", [Scope.INFER], "sales"))
    with serving(models_folder, tmp_path, "--keys", str(keys)) as server:
        server.client.headers["authorization"] = f"Bearer {weak.read_text()}"
        server.infer("words", ["who"]).raise_for_status()
        once = ["top", server.address, "--once", "--interval", "0.01"]
        assert cli.main([*once, "--key-file", str(key_file)]) == 0
        assert re.search(r"^sales reader +0/s", capsys.readouterr().out, re.MULTILINE)
        assert cli.main(once) == 1
        assert f"name its file with --key-file, or set {settings.CLIENT_KEY}" in capsys.readouterr().err
        assert cli.main([*once, "--key-file", str(weak)]) == 1
        assert "name the file of another key with --key-file" in capsys.readouterr().err
        monkeypatch.setenv(settings.CLIENT_KEY, key_file.read_text())
        assert cli.main(once) == 0


def test_watch_survives_a_restart_of_the_service(models_folder: Path, tmp_path: Path) -> None:
    """The output is a pipe, so frames follow each other."""
    read, write = os.pipe()
    output = Output(read)
    with serving(models_folder, tmp_path) as server, running_top(server.address, write):
        os.close(write)
        server.infer("words", BODY["inputs"])  # type: ignore[arg-type] # the inputs of the body
        at = output.wait_for(rf"seqserve {server.address}  ready\nrequests ")
        server.stop()
        at = output.wait_for(r"no answer\n\nConnection refused; the levels are \S+ \w+ old; trying again", at)
        with serving(models_folder, tmp_path, "--port", server.address.rpartition(":")[2]) as second:
            assert second.address == server.address
            at = output.wait_for(r"  ready\n", at)
            output.wait_for(r"the service was restarted \S+ \w+ ago: its counters began again", at)
    os.close(read)
    assert "\x1b" not in output.text


@contextmanager
def terminal(lines: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield both ends of a terminal of this size: the master, and the end for the program."""
    master, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    try:
        yield master, end
    finally:
        os.close(master)
        os.close(end)


def test_terminal_is_redrawn_in_place_and_restored(server: Server) -> None:
    with terminal(24, 80) as (master, end):
        output = Output(master)
        with answering(server, BODY), running_top(server.address, end, TERM="xterm-256color"):
            at = output.wait_for(r"\x1b\[\?1049h")
            at = output.wait_for("words 2", at)
            output.wait_for("words 2", at)
        output.wait_for(r"\x1b\[\?1049l")
        assert "\x1b[?25l" in output.text and "\x1b[?25h" in output.text, "the cursor is hidden, and shown again"


def test_dumb_terminal_gets_one_frame_after_the_other(server: Server) -> None:
    with terminal(24, 80) as (master, end):
        output = Output(master)
        with running_top(server.address, end, TERM="dumb"):
            at = output.wait_for("rates follow")
            output.wait_for(r"requests \d", at)
    assert "\x1b" not in output.text
