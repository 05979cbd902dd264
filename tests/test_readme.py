"""What the README shows is what a newcomer gets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cli import main
from tests.serving import Server, serving

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server over the models that come with the project."""
    with serving(ROOT / "models", tmp_path_factory.mktemp("log")) as running:
        yield running


def test_the_request_that_it_shows_has_the_answer_that_it_shows(embedded: Server) -> None:
    asked = re.search(r"-d '(.+?)'", README)
    shown = re.search(r"```json\n(.+?)```", README, re.DOTALL)
    assert asked and shown
    expected, answer = json.loads(shown[1]), embedded.client.post("/infer", content=asked[1]).json()
    assert [output["label"] for output in answer["outputs"]] == [output["label"] for output in expected["outputs"]]
    for ours, theirs in zip(answer["outputs"], expected["outputs"], strict=True):
        assert ours["scores"] == pytest.approx(theirs["scores"], abs=1e-4)
    assert {**answer, "outputs": []} == {**expected, "outputs": []}


def test_the_chunks_that_it_shows_have_the_answer_of_the_whole_that_it_shows(embedded: Server) -> None:
    asked = [json.loads(body) for body in re.findall(r"-d '(.+?)'", README) if "session" in body]
    shown = re.search(r"`(\[\[.+?\]\])` it answers `(.+?)`", README)
    assert shown
    rows, expected = json.loads(shown[1]), json.loads(shown[2])
    assert [row for body in asked for row in body["inputs"][0]] == rows
    answers = [embedded.client.post("/infer", json=body).json() for body in asked]
    assert answers[-1]["outputs"][0]["value"] == pytest.approx(expected["value"], abs=1e-3)
    said = re.search(r'`"session": (\{.+?\})`', README)
    assert said and answers[-1]["session"] == json.loads(said[1])


def test_the_stream_that_it_shows_prints_the_answer_of_the_whole(embedded: Server) -> None:
    code = re.search(r"```python\n(.+?)```", README, re.DOTALL)
    shown = re.search(r"it answers `(.+?)`", README)
    assert code and shown
    address = embedded.address.removeprefix("http://")
    told = subprocess.run(
        [sys.executable, "-c", code[1].replace("127.0.0.1:8000", address)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    last = json.loads(told.stdout.splitlines()[-1])
    assert last["outputs"][0]["value"] == pytest.approx(json.loads(shown[1])["value"], abs=1e-3)
    assert last["session"]["steps"] == 2


def test_triton_s_client_prints_what_it_says(embedded: Server) -> None:
    [code] = [block for block in re.findall(r"```python\n(.+?)```", README, re.DOTALL) if "tritonclient" in block]
    address = embedded.address.removeprefix("http://")
    told = subprocess.run(
        [sys.executable, "-c", code.replace("127.0.0.1:8000", address)], capture_output=True, text=True, timeout=60, check=True
    )
    shown = re.search(r"# (\[\[.+?\]\])", code)
    assert shown and told.stdout.strip() == shown[1]


def test_every_path_of_its_table_is_served(embedded: Server) -> None:
    for method, path in re.findall(r"`(GET|POST) (/\w+)`", README):
        assert embedded.client.request(method, path).status_code in (200, 400), path


def test_the_service_is_ready_within_10_seconds_with_the_embedded_model(tmp_path: Path) -> None:
    with serving(ROOT / "models", tmp_path) as running:
        assert running.ready()
        assert running.start_seconds < 10


def test_its_command_without_a_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    command = re.search(r"seqserve (infer --model \S+) \"(.+?)\"", README)
    assert command
    assert main([*command[1].split(), command[2]]) == 0
    assert json.loads(capsys.readouterr().out)["label"] == "HUM"


def test_every_file_that_it_names_exists() -> None:
    for name in re.findall(r"\]\(([^):#]+)\)", README):
        assert (ROOT / name).is_file(), name


def test_every_request_that_it_shows_says_that_it_is_json() -> None:
    commands = README.split("curl -s http://127.0.0.1:8000/infer")[1:]
    assert len(commands) == 3
    for command in commands:
        assert "Content-Type: application/json" in command.partition("-d '")[0]
