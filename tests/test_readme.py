"""What the README shows is what a newcomer gets."""

from __future__ import annotations

import json
import re
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
    for name in re.findall(r"\]\(([^):]+)\)", README):
        assert (ROOT / name).is_file(), name
