"""`make loadtest`: users of every kind, exact figures, and a status that shows failed requests."""

from __future__ import annotations

import csv
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from loadtest import chart, discovery, synthetic_models
from loadtest.__main__ import main
from loadtest.request_log import ANSWERED, HUNG_UP, LoggedRequest, RequestLogReader, RequestLogWriter, RequestTotals
from service.modeling.spec import ModelSpec
from service.supervisor.repository import Repository
from tests.serving import Server

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = ["BatchOfTen", "FloatFeatures", "ImpatientCaller", "OneText", "SensorStream"]


def rows(file: Path) -> dict[str, dict[str, str]]:
    """Return the figures by kind of user."""
    with file.open(newline="") as lines:
        return {row["kind"]: row for row in csv.DictReader(lines)}


def logged(file: Path) -> list[LoggedRequest]:
    return list(RequestLogReader(file).read())


def test_every_kind_of_user_gets_answers_without_failures(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions, open_sessions = server.metric("seqserve_sessions_ended_total", reason="ended"), server.metric("seqserve_sessions")
    disconnected, out = server.metric("seqserve_requests_total", outcome="client_gone"), tmp_path / "deep" / "out"
    words = ("--models", str(models_folder), "--users", "8", "--seconds", "3", "--out", str(out))
    assert main(["locust", "--url", f"{server.address}/", *words]) == 0
    printed = capsys.readouterr()
    assert "8 users for 3 s" in printed.out
    assert "words 2" in printed.out
    assert " of 3 s " in printed.err, "progress is printed"
    figures = rows(out / "figures.csv")
    assert list(figures) == [*KINDS, "total"]
    assert all(row["failed"] == "0" for row in figures.values())
    assert all(int(figures[kind]["answers"]) > 0 for kind in ("BatchOfTen", "FloatFeatures", "OneText", "SensorStream"))
    requests = logged(out / "requests.csv")
    assert sum(request.outcome == ANSWERED for request in requests) == int(figures["total"]["answers"])
    assert {request.outcome for request in requests} == {ANSWERED, HUNG_UP}
    assert "<html" in (out / "locust.html").read_text()
    with Image.open(out / "loadtest.png") as image:
        image.verify()
        assert image.format == "PNG"
    assert server.metric("seqserve_sessions_ended_total", reason="ended") > sessions
    assert server.metric("seqserve_sessions") <= open_sessions, "each user ends its session"
    noticed = server.metric("seqserve_requests_total", outcome="client_gone") - disconnected
    assert 0 < noticed <= int(figures["ImpatientCaller"]["hung up"])
    assert figures["total"]["hung up"] == figures["ImpatientCaller"]["hung up"]


def test_new_server_has_the_embedded_models_and_the_sensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["locust", "--users", "7", "--seconds", "5", "--out", str(tmp_path), "--", "--device", "cpu"]) == 0
    served = "question-type-cnn 1, question-type-lstm 1, question-type-sru 1, sensor-forecast 1, sensors 1"
    assert served in capsys.readouterr().out
    assert list(rows(tmp_path / "figures.csv")) == [*KINDS, "total"]
    assert '"ended"' in (tmp_path / "server.log").read_text()


TIRED = {"name": "tired", "version": "1", "min_steps": 1, "input": {"kind": "text", "max_steps": 9, "vocabulary": 5}}
SLOW_SECONDS = 1.5


class Overloaded(BaseHTTPRequestHandler):
    """Describes one text model, slowly, and refuses every inference request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(SLOW_SECONDS)
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
        seconds = "1"
        assert float(seconds) < SLOW_SECONDS, "the start takes longer than the load"
        assert main(["locust", "--url", url, "--users", "2", "--seconds", seconds, "--out", str(tmp_path)]) == 1
    printed = capfd.readouterr()
    assert "OneText: " in printed.out
    assert "failed with 503 overloaded" in printed.out
    assert "FloatFeatures is skipped" in printed.err, "no model with features is served"
    assert "SensorStream is skipped: the server has no model that streams" in printed.err
    assert rows(tmp_path / "figures.csv")["total"]["answers"] == "0"
    assert (tmp_path / "loadtest.png").stat().st_size > 0


def test_missing_server_is_reported_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["locust", "--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 2
    assert "http://127.0.0.1:9/models does not answer like seqserve" in capsys.readouterr().err


def test_failed_server_start_names_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["locust", "--out", str(tmp_path), "--", "--frontends", "none"]) == 2
    assert "server.log" in capsys.readouterr().err
    assert "--frontends is 'none'" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize("words", [["--users", "0"], ["--seconds", "half"]], ids=" ".join)
def test_invalid_count_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["locust", *words])
    assert f"{words[1]} is not a whole number above zero" in capsys.readouterr().err


def test_sensors_are_added_to_the_models_folder(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    assert synthetic_models.with_sensors(ROOT / "models", root) == root
    after, before = Repository(root).manifest(), Repository(ROOT / "models").manifest()
    specs = {model_version.name: ModelSpec.model_validate_json(model_version.spec) for model_version in after.model_versions}
    assert set(specs) == {*(model_version.name for model_version in before.model_versions), "sensors"}
    assert after.aliases == before.aliases
    assert specs["sensors"].input.kind == "features"


def test_discovery_returns_newest_versions_and_words(server: Server, models_folder: Path, tmp_path: Path) -> None:
    served = discovery.served(server.address)
    assert {name: model["version"] for name, model in served.items()} == {"sensors": "1", "words": "2"}
    assert "how" in discovery.words(models_folder, served["words"])
    assert discovery.words(tmp_path, served["words"]) == []
    assert discovery.words(models_folder, served["sensors"]) == []


def test_request_log_is_read_while_it_is_written(tmp_path: Path) -> None:
    reader = RequestLogReader(tmp_path / "requests.csv")
    assert list(reader.read()) == []
    with closing(RequestLogWriter(tmp_path / "requests.csv")) as writer:
        assert list(reader.read()) == []
        writer.write("OneText", 12.3456, ANSWERED)
        writer.write("OneText", math.nan, HUNG_UP)
        first, second = reader.read()
        writer.write("OneText", 1.0, "a reason, with commas\nand lines")
        assert [request.outcome for request in reader.read()] == ["a reason, with commas and lines"]
    assert (first.kind, first.ms, first.outcome) == ("OneText", 12.346, ANSWERED)
    assert first.at_s == pytest.approx(0.0123456, abs=1e-6), "the test starts with the first request"
    assert math.isnan(second.ms)


def test_partial_line_of_the_request_log_is_read_later(tmp_path: Path) -> None:
    with (tmp_path / "requests.csv").open("w", buffering=1) as file:
        reader = RequestLogReader(tmp_path / "requests.csv")
        for part in ("at_s,ki", "nd,ms,outcome\n1.5,OneText,3.0,answ"):
            file.write(part)
            file.flush()
            assert list(reader.read()) == []
        file.write("ered\n")
        assert list(reader.read()) == [LoggedRequest(1.5, "OneText", 3.0, ANSWERED)]


def test_totals_count_outcomes_by_kind() -> None:
    totals = RequestTotals()
    totals.add(
        [
            LoggedRequest(0.5, "a", 10.0, ANSWERED),
            LoggedRequest(1.0, "b", 30.0, ANSWERED),
            LoggedRequest(1.5, "a", 5.0, "503 overloaded"),
        ]
    )
    totals.add([LoggedRequest(2.0, "b", math.nan, HUNG_UP)])
    assert totals.total.answers == [0.01, 0.03]
    assert totals.total.seconds == totals.kinds["a"].seconds == 2.0
    assert totals.kinds["a"].rate == 0.5
    assert (totals.kinds["a"].failures, totals.kinds["b"].failed) == ({"503 overloaded": 1}, 0)
    assert totals.hung_up == {"a": 0, "b": 1}


@pytest.mark.parametrize("seconds", [0.2, 30])
def test_chart_is_drawn_for_any_outcome(tmp_path: Path, seconds: float) -> None:
    file = tmp_path / "chart.png"
    some = [LoggedRequest(at / 10, "OneText", 5.0, "503 overloaded" if at % 3 else ANSWERED) for at in range(300)]
    for requests in (some, some[:1], []):
        chart.draw(file, requests, seconds, "title", "subtitle")
        with Image.open(file) as image:
            assert min(image.size) > 800
