"""Streams and plots while the service runs, and while its engine restarts."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.long.ui.browser import choose, run
from tests.serving import Server, eventually

TILES = ["Latency", "Requests", "Queue", "Batch", "Device"]


@pytest.fixture(autouse=True)
def _ended(page: Page) -> Iterator[None]:
    yield
    if page.locator("#stream-start").inner_text() == "Stop":
        page.locator("#stream-start").click()


def start(page: Page, model: str, rate: int = 40, size: int = 1) -> None:
    choose(page, model)
    page.locator("#stream-size").fill(str(size))
    page.locator("#stream-rate").fill(str(rate))
    page.get_by_role("button", name="Start", exact=True).click()


def steps(page: Page) -> int:
    facts = page.locator("#stream-facts").inner_text()
    return int(re.findall(r"^(\d+) step", facts)[0])


def await_steps(page: Page, count: int) -> None:
    page.wait_for_function("count => parseInt(document.getElementById('stream-facts')?.textContent) >= count", arg=count)


@pytest.mark.parametrize(("model", "lines"), [("sensors", 3), ("series", 2), ("forecaster", 2)])
def test_answers_are_drawn_as_they_come(model: str, lines: int, page: Page) -> None:
    start(page, model)
    await_steps(page, 12)
    expect(page.locator("#stream-status")).to_have_text("Streaming")
    answered = page.locator("#stream-view figure", has_text="answered")
    assert answered.locator("path.line").count() == lines
    lengths = answered.locator("path.line").evaluate_all("all => all.map((one) => one.getAttribute('d').split('L').length)")
    assert min(lengths) >= 3
    assert "answered in" in page.locator("#stream-facts").inner_text()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#stream-status")).to_have_text("Stopped")


def test_chunks_have_the_chosen_size(page: Page) -> None:
    with page.expect_websocket() as opened:
        start(page, "sensors", rate=20, size=7)
        with opened.value.expect_event("framesent") as sent:
            pass
    assert str(sent.value).count("],[") == 6
    await_steps(page, 21)
    assert steps(page) % 7 == 0


def test_ids_stream_too(page: Page) -> None:
    start(page, "speller")
    await_steps(page, 6)
    assert page.locator("#stream-view .bars li").count() == 4


def test_texts_stream_word_by_word(page: Page) -> None:
    choose(page, "labeller")
    page.get_by_label("Text", exact=True).fill("how far is\nthe sea")
    frames: list[str] = []
    page.once("websocket", lambda socket: socket.on("framesent", lambda frame: frames.append(str(frame))))
    page.get_by_label("Words per chunk").fill("3")
    page.get_by_role("button", name="Start", exact=True).click()
    await_steps(page, 9)
    assert [json.loads(frame)["input"] for frame in frames[:3]] == ["how far is", "the sea how", "far is the"]
    assert page.locator("#stream-view .token").count() == 3
    assert page.locator("#stream-view .token-text").first.inner_text() in ("how", "the", "far", "is", "sea")


def test_session_ends_with_the_stream(page: Page, site: Server) -> None:
    start(page, "sensors")
    await_steps(page, 3)
    eventually(lambda: site.metric("seqserve_sessions") == 1)  # the session of an earlier stream may still end
    page.get_by_role("button", name="Stop", exact=True).click()
    eventually(lambda: site.metric("seqserve_sessions") == 0)


def test_model_without_sessions_has_no_stream(page: Page) -> None:
    choose(page, "words")
    expect(page.locator("#stream")).to_be_hidden()


def test_stream_of_a_wrong_input_does_not_start(page: Page) -> None:
    choose(page, "sensors")
    for text, message in (("1, 2", "takes 3"), ("", "has no steps")):
        page.get_by_label("Rows of numbers", exact=True).fill(text)
        page.get_by_role("button", name="Start", exact=True).click()
        assert message in page.locator("#stream-view").get_by_role("alert").inner_text()
        expect(page.get_by_role("button", name="Start", exact=True)).to_be_visible()


def tile_value(page: Page, name: str) -> Locator:
    """Return the value of a tile. Its name is matched as a whole: another tile may show "no requests"."""
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).locator(".tile-value")


def test_plots_show_what_the_service_does(page: Page, site: Server) -> None:
    assert page.locator(".tile-name").all_inner_texts() == TILES
    start(page, "sensors", rate=30)
    expect(tile_value(page, "Requests")).to_have_text(re.compile(r"^[1-9][\d.]* per s$"))
    expect(tile_value(page, "Latency")).to_have_text(re.compile(r"^[\d.]+ (µs|ms|s)$"))
    expect(tile_value(page, "Batch")).to_have_text("1")
    expect(tile_value(page, "Device")).to_have_text(re.compile(r"^[\d.]+ %$"))
    expect(page.locator("#live-plots")).to_contain_text("Open sessions: 1.")
    shapes = page.locator(".tile .area").evaluate_all("all => all.filter((one) => one.getAttribute('d')).length")
    assert shapes >= 6  # several stages, the rate, the batch and the device


def test_page_survives_the_restart_of_an_engine(page: Page, site: Server) -> None:
    start(page, "sensors")
    await_steps(page, 3)
    engine = site.pid("engine-0")
    os.kill(engine, signal.SIGKILL)
    alert = page.locator("#stream-view").get_by_role("alert")
    expect(alert).to_contain_text(re.compile("session|engine"))
    eventually(lambda: site.pid("engine-0") != engine and site.ready())
    page.get_by_role("button", name="Start", exact=True).click()
    await_steps(page, 3)
    page.get_by_role("button", name="Stop", exact=True).click()
    run(page)
    expect(page.locator("#result .bars")).to_be_visible()
    expect(page.locator("#ready")).to_have_text("ready")


def test_page_reports_a_service_that_does_not_answer(page: Page) -> None:
    choose(page, "words")
    page.route("**/*", lambda route: route.abort())
    run(page)
    alert = page.locator("#result").get_by_role("alert")
    expect(alert).to_contain_text("Not reachable")
    expect(page.locator("#ready")).to_have_text("no answer")
    expect(page.locator("#live-plots")).to_contain_text("does not answer")
    page.unroute_all()
    alert.get_by_role("button", name="Try again").click()
    expect(page.locator("#result .bars")).to_be_visible()
    expect(page.locator("#ready")).to_have_text("ready")
    expect(page.locator("#live-plots .tile")).to_have_count(len(TILES))


def test_hidden_page_asks_for_nothing(browser: Browser, page: Page, tmp_path: Path) -> None:
    page.evaluate("""() => {
      Object.defineProperty(document, "hidden", { configurable: true, get: () => true });
      document.dispatchEvent(new Event("visibilitychange"));
    }""")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2500)
    assert [url for url in asked if url.endswith("/metrics")] == []
    with page.expect_request("**/metrics"):
        page.evaluate("""() => {
          delete document.hidden;
          document.dispatchEvent(new Event("visibilitychange"));
        }""")
