"""README and docs: every request, program, command, setting and link that they show works."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from service.cli import main
from service.errors import STATUS
from service.settings import NO_SETTINGS, PREFIX, Settings
from tests.serving import Server, serving

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
BLOCK = re.compile(r"```(\w+)\n(.+?)```", re.DOTALL)
MAKEFILE = (ROOT / "Makefile").read_text()
OTHERS = {*NO_SETTINGS, "SEQSERVE_TEST_ALL", "SEQSERVE_NAME"}
MAX_LINES, MAX_COLUMNS = 150, 120


class Example(NamedTuple):
    """Requests that a page shows, and the reply to the last of them if the page shows it."""

    bodies: list[dict[str, Any]]
    reply: dict[str, Any] | None


def requests(page: str) -> Iterator[Example]:
    """Yield each shell block of `page` that sends requests to /infer."""
    blocks = BLOCK.findall(page)
    for (language, code), (next_language, next_code) in pairwise([*blocks, ("", "")]):
        words = shlex.split(code, comments=True) if language == "sh" and "/infer" in code else []
        bodies = [json.loads(word) for before, word in pairwise(words) if before == "-d"]
        if bodies:
            assert code.count("Content-Type: application/json") == len(bodies)
            yield Example(bodies, json.loads(next_code) if next_language == "json" else None)


EXAMPLES = [(name, example) for name, page in PAGES.items() for example in requests(page)]
PROGRAMS = [
    (name, code)
    for name, page in PAGES.items()
    for language, code in BLOCK.findall(page)
    if language == "python" and name != "docs/exporting.md"  # tests/long runs it
]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server over the embedded models."""
    with serving(ROOT / "models", tmp_path_factory.mktemp("log")) as running:
        yield running


def run(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a program in this process, in which its libraries are loaded already, and return what it prints."""
    capsys.readouterr()
    exec(compile(code, "a page", "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out.strip()


def test_pages_show_requests_and_programs() -> None:
    assert {name for name, _ in EXAMPLES} >= {"README.md", "docs/http.md", "docs/streams.md"}
    assert {name for name, _ in PROGRAMS} >= {"README.md", "docs/grpc.md", "docs/streams.md", "docs/kernels.md"}


@pytest.mark.parametrize(("name", "example"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_request_has_the_reply_that_the_page_shows(name: str, example: Example, embedded: Server) -> None:
    replies = [embedded.client.post("/infer", json=body) for body in example.bodies]
    assert [reply.status_code for reply in replies] == [200] * len(replies), [reply.text for reply in replies]
    if example.reply is not None:
        assert_alike(replies[-1].json(), example.reply)


def assert_alike(actual: Any, shown: Any) -> None:
    """Compare two replies; a page rounds numbers to three digits."""
    if isinstance(shown, dict):
        assert actual.keys() == shown.keys()
        for key, value in shown.items():
            assert_alike(actual[key], value)
    elif isinstance(shown, list):
        assert len(actual) == len(shown)
        for ours, theirs in zip(actual, shown, strict=True):
            assert_alike(ours, theirs)
    else:
        assert actual == (pytest.approx(shown, abs=1e-3) if isinstance(shown, float) else shown)


@pytest.mark.parametrize(("name", "code"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_program_prints_what_the_page_shows(
    name: str,
    code: str,
    embedded: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The importing page's program writes the checkpoint that its command imports. A stream ends with the shown reply to its last chunk."""
    monkeypatch.chdir(tmp_path)
    address = embedded.address.removeprefix("http://")
    printed = run(code.replace("127.0.0.1:8000", address).replace("127.0.0.1:8001", embedded.grpc), capsys)
    shown = re.search(r"  # (.+)\n$", code)
    assert printed or name == "docs/importing.md"
    if shown:
        assert printed.splitlines()[-1] == shown[1]
    if name == "docs/streams.md":
        [example] = requests(PAGES[name])
        last = json.loads(printed.splitlines()[-1])
        assert example.reply is not None and last["session"]["steps"] == example.reply["session"]["steps"]
        assert_alike(last["outputs"], example.reply["outputs"])
    if name == "docs/importing.md":
        command = re.search(r"^seqserve (import .+)$", PAGES[name], re.MULTILINE)
        assert command
        assert main(command[1].split()) == 0
        imported = capsys.readouterr().out
        assert re.search(r"^.*scores.*$", imported, re.MULTILINE) and "is complete" in imported
        assert (tmp_path / "my-models" / "sentiment" / "1" / "card.md").exists()


def test_endpoints_of_the_page_are_served(embedded: Server) -> None:
    """The tokens equal the tokens on the page."""
    shown = re.search(r"/tokens .*?-d '(.+?)'\n```\n\n```text\n(.+?)```", PAGES["docs/http.md"], re.DOTALL)
    assert shown
    assert embedded.client.post("/tokens", json=json.loads(shown[1])).json() == json.loads(shown[2])
    endpoints = re.findall(r"`(GET|POST) (/\w+)`", PAGES["docs/http.md"])
    assert len(endpoints) > 5
    for method, path in endpoints:
        assert embedded.client.request(method, path).status_code in (200, 400, 404 if path == "/stream" else 200), path


def test_table_of_errors_is_the_one_in_errors_py() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \| (\w+) \|", PAGES["docs/http.md"], re.MULTILINE)
    assert sorted(rows) == sorted((str(status.http), error.code, status.grpc) for error, status in STATUS.items())


def test_command_without_a_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    command = re.search(r"seqserve (infer --model \S+) \"(.+?)\"", README)
    assert command
    assert main([*command[1].split(), command[2]]) == 0
    assert json.loads(capsys.readouterr().out)["label"] == "HUM"


def test_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings(name: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]+))?\)", PAGES[name]):
        file = (ROOT / name).parent / target if target else ROOT / name
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), f"{target}#{anchor}"


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_settings_and_make_targets_exist(name: str) -> None:
    settings = {f"{PREFIX}{setting.upper()}" for setting in Settings.model_fields} | OTHERS
    assert set(re.findall(r"\bSEQSERVE_[A-Z_]+\b", PAGES[name])) <= settings
    commands = re.findall(r"`make ([a-z][\w-]*)", PAGES[name]) + re.findall(
        r"^(?:\w+=\S+ )*make ([a-z][\w-]*)", PAGES[name], re.MULTILINE
    )
    for target in commands:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target


def test_tables_of_reliability_name_files_that_exist() -> None:
    files = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGES["docs/reliability.md"]))
    assert len(files) > 50
    assert [file for file in files if not (ROOT / file).is_file()] == []
