"""`make loadtest`: users of every kind, and a status that shows failed requests."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loadtest.__main__ import main
from tests.serving import Server

KINDS = ["OneText", "TenTexts", "TokenIds", "Session", "OpenInference"]


def figures(printed: str) -> dict[str, tuple[int, int]]:
    """Return the numbers of requests and failures by kind of user from locust's table."""
    lines = re.findall(r"^(?:POST)? +([A-Z][A-Za-z ]+?) +(\d+) +(\d+)\([\d.]+%\) \|", printed, re.MULTILINE)
    return {name: (int(requests), int(failures)) for name, requests, failures in lines}


def test_every_kind_of_user_gets_answers_without_failures(
    server: Server, models_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sessions, open_sessions = server.metric("seqserve_sessions_ended_total", reason="ended"), server.metric("seqserve_sessions")
    out = tmp_path / "deep" / "out"
    words = ("--models", str(models_folder), "--users", "8", "--seconds", "3", "--out", str(out))
    assert main(["locust", "--url", f"{server.address}/", *words]) == 0
    printed = capfd.readouterr()
    assert "8 users for 3 s" in printed.out and "words 2" in printed.out
    rows = figures(printed.err)
    assert not any(failures for _, failures in rows.values())
    assert all(rows[kind] > (0, 0) for kind in KINDS)
    assert "<html" in (out / "locust.html").read_text()
    assert server.metric("seqserve_sessions_ended_total", reason="ended") > sessions
    assert server.metric("seqserve_sessions") <= open_sessions, "each user ends its session"


def test_new_server_has_the_embedded_models(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["locust", "--users", "7", "--seconds", "5", "--out", str(tmp_path), "--", "--device", "cpu"]) == 0
    served = "question-type-cnn 1, question-type-lstm 1, question-type-sru 1, sensor-forecast 1"
    printed = capfd.readouterr()
    assert served in printed.out
    assert {*KINDS} < figures(printed.err).keys()
    assert '"ended"' in (tmp_path / "server.log").read_text()


TIRED = {"name": "tired", "version": "1", "min_steps": 1, "input": {"kind": "text", "max_steps": 9, "vocabulary": 5}}


class Overloaded(BaseHTTPRequestHandler):
    """Describes one text model and refuses every inference request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._respond(200, {"models": [TIRED]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._respond(503, {"error": "9 wait", "code": "overloaded"})

    def _respond(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Log nothing."""


@contextmanager
def overloaded() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Overloaded)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_failed_request_is_reported_with_status_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with overloaded() as url:
        assert main(["locust", "--url", url, "--users", "2", "--seconds", "1", "--out", str(tmp_path)]) == 1
    printed = capfd.readouterr().err
    assert "503 overloaded" in printed
    assert "Session is skipped: the server has no model for it" in printed, "no model streams"
    requests, failures = figures(printed)["Aggregated"]
    assert requests == failures > 0


def test_missing_server_is_reported_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["locust", "--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 2
    assert "http://127.0.0.1:9/models does not answer like seqserve" in capsys.readouterr().err


def test_failed_server_start_names_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["locust", "--out", str(tmp_path), "--", "--frontends", "none"]) == 2
    assert "server.log" in capsys.readouterr().err
    assert "--frontends is 'none'" in (tmp_path / "server.log").read_text()
