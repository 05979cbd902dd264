"""With keys, the page asks for a key and shows the parts that its scopes allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page, expect

from service.access.keys import create
from service.access.scopes import Scope
from tests.long.ui.conftest import choose, opened, run
from tests.planted import constants
from tests.serving import Server, serving

SCOPES = {
    "everything": [Scope.INFER, Scope.SESSION, Scope.METRICS],
    "infers": [Scope.INFER],
    "measures": [Scope.METRICS],
    "administers": [Scope.ADMIN],
}


class Guarded(NamedTuple):
    """A server with keys, by name."""

    server: Server
    keys: dict[str, str]


@pytest.fixture(scope="module")
def guarded(models_folder: Path, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    scratch = tmp_path_factory.mktemp("keys")
    file = scratch / "keys.toml"
    keys = {name: create(file, name, scopes, "tenant") for name, scopes in SCOPES.items()}
    with (
        constants({"service.access.refused_keys.DELAY_SECONDS": 0}),
        serving(models_folder, scratch, "--keys", str(file)) as server,
    ):
        yield Guarded(server, keys)


@pytest.fixture
def locked(guarded: Guarded, browser: Browser) -> Iterator[Page]:
    """The page before a key is entered."""
    with opened(browser, guarded.server) as page:
        expect(page.get_by_label("Key", exact=True)).to_be_focused()
        yield page


def enter(page: Page, key: str) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Continue").click()


@pytest.mark.parametrize(
    ("key", "models", "stream", "live"),
    [
        ("everything", True, True, True),
        ("infers", True, False, False),
        ("measures", False, False, True),
    ],
)
def test_page_shows_what_the_scopes_allow(
    key: str, models: bool, stream: bool, live: bool, locked: Page, guarded: Guarded
) -> None:
    refused: list[str] = []
    locked.on("response", lambda response: refused.append(response.url) if response.status >= 400 else None)
    enter(locked, guarded.keys[key])
    expect(locked.locator("#caller")).to_have_text(f"key {key}")
    if models:
        choose(locked, "sensors")
        run(locked)
        expect(locked.locator("#result .bars")).to_be_visible()
        assert locked.get_by_role("tab", name="WebSocket").count() == stream
    for part, visible in (("#models", models), ("#work", models), ("#stream", stream), ("#live", live)):
        expect(locked.locator(part)).to_be_visible(visible=visible)
    expect(locked.locator("#nothing")).to_be_visible(visible=not (models or live))
    if live:
        expect(locked.locator(".tile")).to_have_count(5)
    assert refused == [], "the page asks for nothing that its key may not have"


def test_key_stays_in_its_tab_until_it_is_forgotten(locked: Page, guarded: Guarded, browser: Browser) -> None:
    enter(locked, guarded.keys["infers"])
    expect(locked.locator("#caller")).to_have_text("key infers")
    locked.reload()
    expect(locked.locator("#caller")).to_have_text("key infers")
    other = locked.context.new_page()
    other.goto("/")
    expect(other.get_by_label("Key", exact=True)).to_be_visible()
    locked.get_by_role("button", name="Forget key").click()
    expect(locked.get_by_label("Key", exact=True)).to_be_visible()
    locked.reload()
    expect(locked.get_by_label("Key", exact=True)).to_be_visible()
    assert guarded.keys["infers"] not in locked.content() and locked.context.cookies() == []
