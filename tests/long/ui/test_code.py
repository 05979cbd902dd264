"""Code for a browser and from the page: what the page shows runs and prints its answer, and examples/clients/browser.html works."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
from ast import literal_eval
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.long.ui.conftest import choose
from tests.serving import Server, eventually, nearly_equal, serving

ROOT = Path(__file__).resolve().parents[3]

TEXT = "how 'far' is\nthe \"sea\" \\ $HOME `x` 🌊 ?"
CASES: list[tuple[str, str, str, str]] = [
    ("words", "Text", TEXT, "label"),
    ("tagger", "Text", TEXT, "labels"),
    ("passages", "Text", TEXT, "start"),
    ("writer", "Text", TEXT, "ids"),
    ("series", "Rows of numbers", "0.25, -1e3\n3, 4.5\n5, 6", "value"),
    ("halver", "Rows of numbers", "1, 2\n3, 4\n5, 6\n7, 8\n9, 10", "sequence"),
    ("pairs", "Token ids", "1, 2, 3", "embedding"),
    ("single", "Token ids", "5, 6", "value"),
]


def code_of(page: Page, tab: str) -> str:
    page.get_by_role("tab", name=tab, exact=True).click()
    return page.locator("#code").inner_text()


def sent_body(page: Page) -> dict[str, Any]:
    """Return the body that the page sends when the model runs."""
    with page.expect_request("**/infer") as sent:
        page.get_by_role("button", name="Run", exact=True).click()
    body: dict[str, Any] = json.loads(sent.value.post_data or "")
    return body


def run_program(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def shown(value: Any) -> np.ndarray[Any, Any]:
    """Return the values that a program prints for an array, from its last brackets."""
    return np.array([float(word) for word in str(value).replace("[", " ").replace("]", " ").split()])


@pytest.mark.parametrize(("model", "field", "value", "output"), CASES, ids=[case[0] for case in CASES])
def test_programs_print_the_answer_of_the_page(
    model: str, field: str, value: str, output: str, page: Page, site: Server
) -> None:
    choose(page, model)
    page.get_by_label(field, exact=True).fill(value)
    body = sent_body(page)
    expected = site.client.post("/infer", json=body).json()["outputs"]
    del body["version"]  # the newest, also when there is a newer one
    eventually(lambda: json.loads(shlex.split(code_of(page, "curl"))[-1]) == body)
    assert shlex.split(code_of(page, "curl"))[:3] == ["curl", "-s", f"{site.address}/infer"]
    assert nearly_equal(literal_eval(run_program(code_of(page, "Python"))), expected)
    for tab in ("tritonclient", "gRPC"):
        printed = run_program(code_of(page, tab))
        wanted = [one[output] for one in expected]
        if output in ("label", "labels"):
            assert re.findall(r"'(\w+)'", printed) == list(np.ravel(wanted))
        else:
            assert shown(printed) == pytest.approx(np.array(wanted, float).ravel(), rel=1e-4, abs=1e-6)


def test_programs_of_streams_end_with_the_answer_to_the_sequence(page: Page, site: Server) -> None:
    choose(page, "series")
    page.get_by_label("Rows of numbers", exact=True).fill("1, 2\n3, 4\n5, 6")
    [expected] = site.client.post("/infer", json=sent_body(page)).json()["outputs"]
    eventually(lambda: "[5,6]" in code_of(page, "WebSocket"))
    printed = run_program(code_of(page, "WebSocket")).splitlines()
    assert len(printed) == 3 and nearly_equal(literal_eval(printed[-1])["outputs"], [expected])
    commands = [shlex.split(command) for command in re.split(r"\n(?=curl)", code_of(page, "Session"))]
    answers = [site.client.post("/infer", json=json.loads(command[-1])).json() for command in commands]
    assert [answer["session"]["steps"] for answer in answers] == [2, 3] and nearly_equal(answers[-1]["outputs"], [expected])
    choose(page, "halver")
    assert page.get_by_role("tab", name="WebSocket").count() == 0, "it takes no streams"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def test_browser_client_shows_answers_forecasts_and_an_error(browser: Browser, tmp_path: Path) -> None:
    """The service allows its origin, and no other."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(ROOT / "examples" / "clients"))) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        origin = f"http://127.0.0.1:{pages.server_port}"
        with serving(ROOT / "models", tmp_path, allowed_origins=origin) as server:
            for address, shown in ((origin, "nobody"), (origin.replace("127.0.0.1", "localhost"), "fetch")):
                page = browser.new_page()
                page.goto(f"{address}/browser.html?service={quote(server.address, safe='')}")
                expect(page.locator("#output")).to_contain_text(shown)
                text = page.locator("#output").inner_text()
                assert text.startswith("NUM\n") == (address == origin), text
                page.close()
        pages.shutdown()
