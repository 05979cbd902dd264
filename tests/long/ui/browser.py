"""A headless Chromium with the page of a server open in it, and the failures there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.serving import LIMIT_SECONDS, Server

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
