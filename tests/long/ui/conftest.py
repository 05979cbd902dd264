"""A headless Chromium with the page of a server open in it, and one server with a model for every input and head."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from service.modeling import store
from service.modeling.spec import ModelSpec
from tests import models
from tests.serving import LIMIT_SECONDS, Server, serving

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PHONE = {"width": 375, "height": 720}
DESKTOP = {"width": 1440, "height": 900}
LIMIT_MS = 2000 * LIMIT_SECONDS
"""Longest wait for something that must happen eventually. An engine that restarts on a busy machine needs more than half a minute."""
expect.set_options(timeout=LIMIT_MS)
EXPECTED = "Failed to load resource"
"""Chromium reports every answer with an error status, which the tests of errors cause."""
HAS_ANSWER = """() => {
  const result = document.getElementById("result");
  return !result.hasAttribute("aria-busy") && !result.textContent.startsWith("Run the model");
}"""
RECORD_VIOLATIONS = (
    "addEventListener('securitypolicyviolation', (event) => console.error('violation of ' + event.violatedDirective))"
)


def find_browser() -> str:
    """Return the path of an installed browser. Skips the test if there is none."""
    for program in PROGRAMS:
        if path := shutil.which(program):
            return path
    pytest.skip("no Chromium is installed: make programs PROGRAMS=browser installs it")


@contextmanager
def launched() -> Iterator[Browser]:
    """Run a browser until the end of the block."""
    path = find_browser()
    # Chromium's own sandbox refuses to run as root, as tests in a container do.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Browser,
    server: Server,
    path: str = "/",
    *,
    scheme: Literal["light", "dark"] = "light",
    size: dict[str, int] = DESKTOP,
    **options: Any,
) -> Iterator[Page]:
    """Open a page of a server. At the end, check that no script failed and that nothing violated the policy of the page."""
    with watched(browser, server, path, scheme=scheme, size=size, **options) as (page, problems):
        yield page
    assert problems == []


@contextmanager
def watched(
    browser: Browser, server: Server, path: str, *, scheme: Literal["light", "dark"], size: dict[str, int], **options: Any
) -> Iterator[tuple[Page, list[str]]]:
    """Open a page of a server. Yields it with a list of failures: exceptions, violations of its policy and other errors."""
    context = browser.new_context(viewport=size, color_scheme=scheme, base_url=server.address, **options)  # type: ignore[arg-type]
    context.set_default_timeout(LIMIT_MS)
    context.add_init_script(RECORD_VIOLATIONS)
    problems: list[str] = []
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if _is_problem(message) else None)
    page.goto(path)
    try:
        yield page, problems
    finally:
        context.close()


def _is_problem(message: ConsoleMessage) -> bool:
    return message.type in ("error", "warning") and not message.text.startswith(EXPECTED)


def choose(page: Page, model: str, version: int = 1) -> None:
    """Choose a model in the list."""
    page.locator(f"#model-list button[data-id='{model}/{version}']").click()
    page.wait_for_function("name => document.getElementById('model-title').textContent === name", arg=model)


def run(page: Page) -> str:
    """Run the chosen model, and return the text of the answer or of the error."""
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_function(HAS_ANSWER)
    return page.locator("#result").inner_text()


# The models and the fixtures.

HOSTILE = "<img src=x onerror=alert(1)>"
HOSTILE_CARD = f"""# {HOSTILE}

<script>alert(1)</script> [run](javascript:alert(1)) [site](https://example.org/a_(b) "title") ![x](http://example.org/x.png)
**{HOSTILE}** `</code><script>alert(1)</script>` <a href="javascript:alert(1)">link</a>

| a | {HOSTILE} |
|---|---|
| 1 | <svg onload=alert(1)> |

- {HOSTILE}
1. *one*

```
<iframe src="http://example.org"></iframe>
```
"""


def hostile(root: Path) -> ModelSpec:
    """Write a model whose labels, description and card try to run scripts and to load files of other hosts."""
    head = {"kind": "classify", "pool": "max", "labels": [HOSTILE, "</script><script>alert(2)</script>", "‮" + "long" * 30]}
    tables = {
        "name": "hostile",
        "description": HOSTILE * 3,
        "precision": "float32",
        "input": models.TEXT,
        "layers": (models.EMBEDDING, {"kind": "gru", "hidden": 5}),
        "head": head,
    }
    spec = ModelSpec.model_validate(tables)
    folder = root / "hostile" / "1"
    return store.write(folder, spec, models.weights(spec), card=HOSTILE_CARD, tokenizer=models.tokenizer())


def every_model(root: Path) -> Path:
    """Write a model for every head, and models that the page shows in another way."""
    gru = {"kind": "gru", "hidden": 5}
    series = {"kind": "features", "features": 2, "names": ["depth", "speed"], "max_steps": 60}
    for make in (*models.OF_EVERY_HEAD.values(), hostile):
        make(root)
    models.sensors(root, hidden=16)
    models.made_up(root, "passages", models.TEXT, models.EMBEDDING, gru, head={"kind": "span"})
    models.made_up(root, "writer", models.TEXT, models.EMBEDDING, gru, head={"kind": "next", "top": 3})
    models.made_up(root, "pairs", models.IDS, models.EMBEDDING, gru, head={"kind": "embed", "pool": "last"})
    models.made_up(root, "series", series, gru, head={"kind": "regress", "pool": "last", "outputs": 2})
    models.made_up(root, "single", models.IDS, models.EMBEDDING, gru, head={"kind": "regress", "pool": "last"})
    return root


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A browser that ends with the tests of this folder: its event loop runs in this thread, where other tests need their own."""
    with launched() as running:
        yield running


@pytest.fixture(scope="session")
def site_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_model(tmp_path_factory.mktemp("site-models"))


@pytest.fixture(scope="package")
def site(site_folder: Path, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with every model, started only where there is a browser."""
    with serving(site_folder, tmp_path_factory.mktemp("log")) as server:
        yield server


@pytest.fixture(scope="module")
def shared_page(browser: Browser, site: Server) -> Iterator[tuple[Page, list[str]]]:
    with watched(browser, site, "/", scheme="light", size=DESKTOP) as (page, problems):
        page.wait_for_selector("#model-list button[aria-current]")
        yield page, problems


@pytest.fixture
def page(shared_page: tuple[Page, list[str]]) -> Iterator[Page]:
    """A page that the tests of a file share, with its list of models. A test finds it as earlier tests left it, except for the search."""
    page, problems = shared_page
    page.get_by_label("Find a model").fill("")
    yield page
    page.unroute_all()
    found, problems[:] = list(problems), []
    assert found == []
