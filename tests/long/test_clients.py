"""The clients in examples/clients, each run against a service as its README says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from service.access.keys import create
from service.access.scopes import Scope
from service.settings import CLIENT_KEY
from tests.serving import LIMIT_SECONDS, Server, serving

ROOT = Path(__file__).resolve().parent.parent.parent
CLIENTS = ROOT / "examples" / "clients"
MAX_LINES = 60
HTTP = ("http_client.py", "client.sh", "Client.java", "client.go")
PYTHON = ("http_client.py", "websocket_client.py", "triton_http.py", "triton_grpc.py")
PROGRAMS = (*PYTHON, "client.sh", "Client.java", "client.go")
RUN = {".py": [sys.executable], ".sh": ["sh"], ".java": ["java"], ".go": ["go", "run"]}
NEEDS = {"client.sh": "curl", "Client.java": "javac", "client.go": "go"}
FORECASTS = ((0.038, -0.393, 0.164), (0.443, -0.433, 0.380), (0.003, -0.345, 0.111))
"""The answers of sensor-forecast after one, two and three rows."""


class Guarded(NamedTuple):
    """A service with a key."""

    server: Server
    key: str

    def address(self, program: str) -> str:
        """Return the address as a program takes it."""
        if program == "triton_grpc.py":
            return self.server.grpc
        return self.server.address.removeprefix("http://") if program == "triton_http.py" else self.server.address


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    scratch = tmp_path_factory.mktemp("clients")
    key = create(scratch / "keys.toml", "example", [Scope.INFER, Scope.SESSION], "example")
    with serving(ROOT / "models", scratch, "--keys", str(scratch / "keys.toml")) as server:
        yield Guarded(server, key)


def installed(*programs: str, remedy: str = "make programs PROGRAMS=toolchains") -> str:
    """Return the first of these programs that is installed. Without any it skips the test, and names the package that installs it."""
    for program in programs:
        if found := shutil.which(program):
            return found
    pytest.skip(f"{programs[0]} is missing: run {remedy}")


def run(program: str, address: str, key: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    if program in NEEDS:
        installed(NEEDS[program])
    command = [*RUN[Path(program).suffix], program, address]
    environment = os.environ | {CLIENT_KEY: key, "GOCACHE": str(scratch / "go"), "HOME": str(scratch)}
    return subprocess.run(command, cwd=CLIENTS, env=environment, capture_output=True, text=True, timeout=300, check=False)


def forecasts(printed: str) -> list[tuple[float, ...]]:
    """Return the forecasts that a program printed, in groups of three numbers."""
    lines = re.findall(r'steps: (.+)|"value":\[(.+?)\]', printed)
    return [tuple(map(float, re.findall(r"-?\d+\.\d+", "".join(line)))) for line in lines]


@pytest.mark.parametrize("program", PROGRAMS)
def test_client_prints_answers_forecasts_and_an_error(program: str, guarded: Guarded, tmp_path: Path) -> None:
    done = run(program, guarded.address(program), guarded.key, tmp_path)
    assert done.returncode == 0, done.stderr
    if program != "websocket_client.py":
        assert re.search(r'^NUM$|"label":"NUM"', done.stdout, re.MULTILINE)
    assert forecasts(done.stdout)[-3:] == [pytest.approx(values, abs=0.001) for values in FORECASTS]
    assert "unknown model nobody" in done.stdout + done.stderr
    assert guarded.key not in done.stdout + done.stderr


@pytest.mark.parametrize("program", HTTP)
def test_client_without_a_key_fails_and_shows_the_reason(program: str, guarded: Guarded, tmp_path: Path) -> None:
    done = run(program, guarded.address(program), "", tmp_path)
    assert done.returncode != 0
    assert "unauthorized" in done.stderr


@contextmanager
def page_server(page: type[SimpleHTTPRequestHandler]) -> Iterator[str]:
    """Serve the folder of the clients. Yields its origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(page, directory=str(CLIENTS))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


WATCH = """<!doctype html>
<iframe id="page" src="/browser.html?service=%s"></iframe>
<script>
const text = () => document.getElementById("page").contentDocument?.getElementById("output")?.textContent ?? "";
const timer = setInterval(() => {
  if (!/nobody|fetch/.test(text())) return;
  clearInterval(timer);
  fetch("/ended?text=" + encodeURIComponent(text()));
}, 50);
</script>"""
"""Shows the page, and reports its text when it has ended."""


class Pages(SimpleHTTPRequestHandler):
    """Serves the clients and `WATCH`, and keeps the report of `WATCH`."""

    service = ""
    reported: threading.Event
    text = ""

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        if path.path == "/ended":
            type(self).text = parse_qs(path.query)["text"][0]
            self.reported.set()
        elif path.path != "/watch":
            super().do_GET()
            return
        body = (WATCH % quote(self.service, safe="")).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def shown(browser: Sequence[str], origin: str, pages: type[Pages], service: str) -> str:
    """Return the text that the page shows when it has ended."""
    pages.service, pages.reported = service, threading.Event()
    with subprocess.Popen([*browser, f"{origin}/watch"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert pages.reported.wait(2 * LIMIT_SECONDS), "the page did not end"
        finally:
            process.terminate()
    return pages.text


@pytest.fixture
def browser(tmp_path: Path) -> list[str]:
    """The command that shows a page in a browser without a window."""
    program = installed("chromium", "google-chrome", remedy="make programs PROGRAMS=browser")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"]
    return [program, *flags, f"--user-data-dir={tmp_path / 'profile'}"]


def test_page_in_the_browser_shows_answers_forecasts_and_an_error(browser: list[str], tmp_path: Path) -> None:
    with page_server(Pages) as origin, serving(ROOT / "models", tmp_path, allowed_origins=origin) as server:
        text = shown(browser, origin, Pages, server.address)
    assert text.startswith("NUM\n")
    assert forecasts(text) == [pytest.approx(values, abs=0.001) for values in FORECASTS]
    assert "unknown_model: unknown model nobody" in text


def test_clients_are_short_and_listed() -> None:
    files = {file.name: file.read_text() for file in CLIENTS.iterdir() if file.is_file()}
    listing = files.pop("README.md")
    assert set(files) == {*PROGRAMS, "browser.html"} == set(re.findall(r"\]\(([\w.]+)\) \|", listing))
    assert {name: len(text.splitlines()) for name, text in files.items() if len(text.splitlines()) > MAX_LINES} == {}
