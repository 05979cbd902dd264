"""`make loadtest`: callers of every kind, figures that are exact, and a status that tells whether a request failed."""

from __future__ import annotations

import csv
import json
import math
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from loadtest import chart, discovery, sensors
from loadtest.__main__ import main
from loadtest.journal import ANSWERED, HUNG_UP, Entry, Reader, Tally, Writer
from service.modeling.spec import ModelSpec
from service.supervisor.repository import Repository
from tests.serving import Server

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = ["BatchOfTen", "FloatFeatures", "ImpatientCaller", "OneText"]


def rows(file: Path) -> dict[str, dict[str, str]]:
    """The figures by kind of caller."""
    with file.open(newline="") as lines:
        return {row["kind"]: row for row in csv.DictReader(lines)}


def entries(file: Path) -> list[Entry]:
    return list(Reader(file).news())


def test_every_kind_of_caller_asks_and_nothing_fails(
    server: Server, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, out = server.metric("seqserve_requests_total", outcome="client_gone"), tmp_path / "deep" / "out"
    words = ("--models", str(models_folder), "--users", "8", "--seconds", "3", "--out", str(out))
    assert main(["--url", f"{server.address}/", *words]) == 0
    printed = capsys.readouterr()
    assert "8 users for 3 s" in printed.out
    assert "words 2" in printed.out
    assert " of 3 s " in printed.err, "it says how far it has come"
    figures = rows(out / "figures.csv")
    assert list(figures) == [*KINDS, "total"]
    assert all(row["failed"] == "0" for row in figures.values())
    assert all(int(figures[kind]["answers"]) > 0 for kind in ("BatchOfTen", "FloatFeatures", "OneText"))
    asked = entries(out / "requests.csv")
    assert sum(entry.outcome == ANSWERED for entry in asked) == int(figures["total"]["answers"])
    assert {entry.outcome for entry in asked} == {ANSWERED, HUNG_UP}
    assert "<html" in (out / "locust.html").read_text()
    with Image.open(out / "loadtest.png") as image:
        image.verify()
        assert image.format == "PNG"
    noticed = server.metric("seqserve_requests_total", outcome="client_gone") - gone
    assert 0 < noticed <= int(figures["ImpatientCaller"]["hung up"])
    assert figures["total"]["hung up"] == figures["ImpatientCaller"]["hung up"]


def test_without_a_server_it_starts_one_over_the_embedded_models_and_the_sensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--users", "6", "--seconds", "1", "--out", str(tmp_path), "--", "--device", "cpu"]) == 0
    served = "question-type-cnn 1, question-type-lstm 1, question-type-sru 1, sensor-forecast 1, sensors 1"
    assert served in capsys.readouterr().out
    assert list(rows(tmp_path / "figures.csv")) == [*KINDS, "total"]
    assert '"ended"' in (tmp_path / "server.log").read_text()


TIRED = {"name": "tired", "version": "1", "min_steps": 1, "input": {"kind": "text", "max_steps": 9, "vocabulary": 5}}


class Overloaded(BaseHTTPRequestHandler):
    """Serves one model over text, and refuses every request for it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say(200, {"models": [TIRED]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say(503, {"error": "9 wait", "code": "overloaded"})

    def _say(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Nobody reads it."""


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


def test_a_request_that_failed_is_named_and_makes_the_status_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with overloaded() as url:
        assert main(["--url", url, "--users", "2", "--seconds", "1", "--out", str(tmp_path)]) == 1
    printed = capfd.readouterr()
    assert "OneText: " in printed.out
    assert "failed with 503 overloaded" in printed.out
    assert "FloatFeatures is left out" in printed.err, "its model is not served, and that is said"
    assert rows(tmp_path / "figures.csv")["total"]["answers"] == "0"
    assert (tmp_path / "loadtest.png").stat().st_size > 0


def test_without_anybody_at_the_address_the_status_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 2
    assert "http://127.0.0.1:9/models is not answered" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_no_riddle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--", "--frontends", "none"]) == 2
    assert "server.log" in capsys.readouterr().err
    assert "--frontends is 'none'" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize("words", [["--users", "0"], ["--seconds", "half"]], ids=" ".join)
def test_a_count_that_cannot_be_is_repeated(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"{words[1]} is no whole number above zero" in capsys.readouterr().err


def test_the_sensors_stand_beside_all_that_there_is(tmp_path: Path) -> None:
    root = tmp_path / "beside"
    root.mkdir()
    assert sensors.beside(ROOT / "models", root) == root
    beside, before = Repository(root).manifest(), Repository(ROOT / "models").manifest()
    specs = {model_version.name: ModelSpec.model_validate_json(model_version.spec) for model_version in beside.model_versions}
    assert set(specs) == {*(model_version.name for model_version in before.model_versions), "sensors"}
    assert beside.aliases == before.aliases
    assert specs["sensors"].input.kind == "features"


def test_discovery_names_the_newest_version_and_finds_the_words(server: Server, models_folder: Path, tmp_path: Path) -> None:
    served = discovery.served(server.address)
    assert {name: model["version"] for name, model in served.items()} == {"sensors": "1", "words": "2"}
    assert "how" in discovery.words(models_folder, served["words"])
    assert discovery.words(tmp_path, served["words"]) == []
    assert discovery.words(models_folder, served["sensors"]) == []


def test_the_journal_is_read_while_it_is_written(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "requests.csv")
    assert list(reader.news()) == []
    with closing(Writer(tmp_path / "requests.csv")) as writer:
        assert list(reader.news()) == []
        writer.write("OneText", 12.3456, ANSWERED)
        writer.write("OneText", math.nan, HUNG_UP)
        first, second = reader.news()
        writer.write("OneText", 1.0, "a reason, with commas\nand lines")
        assert [entry.outcome for entry in reader.news()] == ["a reason, with commas and lines"]
    assert (first.kind, first.ms, first.outcome) == ("OneText", 12.346, ANSWERED)
    assert first.at_s == pytest.approx(0.0123456, abs=1e-6), "the first request's start is the start of all"
    assert math.isnan(second.ms)


def test_half_a_line_of_the_journal_waits_for_its_other_half(tmp_path: Path) -> None:
    with (tmp_path / "requests.csv").open("w", buffering=1) as file:
        reader = Reader(tmp_path / "requests.csv")
        for part in ("at_s,ki", "nd,ms,outcome\n1.5,OneText,3.0,answ"):
            file.write(part)
            file.flush()
            assert list(reader.news()) == []
        file.write("ered\n")
        assert list(reader.news()) == [Entry(1.5, "OneText", 3.0, ANSWERED)]


def test_a_tally_has_answers_failures_and_hang_ups_by_kind_and_in_total() -> None:
    tally = Tally()
    tally.add([Entry(0.5, "a", 10.0, ANSWERED), Entry(1.0, "b", 30.0, ANSWERED), Entry(1.5, "a", 5.0, "503 overloaded")])
    tally.add([Entry(2.0, "b", math.nan, HUNG_UP)])
    assert tally.total.answers == [0.01, 0.03]
    assert tally.total.seconds == tally.kinds["a"].seconds == 2.0
    assert tally.kinds["a"].rate == 0.5
    assert (tally.kinds["a"].failures, tally.kinds["b"].failed) == ({"503 overloaded": 1}, 0)
    assert tally.hung_up == {"a": 0, "b": 1}


@pytest.mark.parametrize("seconds", [0.2, 30])
def test_a_chart_is_drawn_of_whatever_came_of_it(tmp_path: Path, seconds: float) -> None:
    file = tmp_path / "chart.png"
    some = [Entry(at / 10, "OneText", 5.0, "503 overloaded" if at % 3 else ANSWERED) for at in range(300)]
    for of in (some, some[:1], []):
        chart.draw(file, of, seconds, "title", "subtitle")
        with Image.open(file) as image:
            assert min(image.size) > 800
