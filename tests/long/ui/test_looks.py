"""How the page looks and how it is used: contrast, both colour schemes, a phone, a keyboard, many models and hostile names."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.long.ui.browser import DESKTOP, PHONE, choose, opened, run
from tests.long.ui.conftest import HOSTILE
from tests.serving import Server

TEXT_CONTRAST = 4.5
LARGE_CONTRAST = 3.0
"""WCAG 2.2, level AA: for text, and for large text and parts of a graphic."""
LARGE_PIXELS = 24
MANY = 1000
VISIBLE_TEXTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return rgba(getComputedStyle(document.documentElement).getPropertyValue("--ground"));
  };
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const text = walker.currentNode.textContent.trim().slice(0, 40);
    texts.push({ text, colour: rgba(style.color), ground: ground(element), size: parseFloat(style.fontSize) });
  }
  return texts;
}"""
LINES = """() => {
  const shown = [...document.querySelectorAll(".line, .area, .swatch, .span")].filter((one) => one.checkVisibility());
  const ground = getComputedStyle(document.body).backgroundColor;
  const colour = ({ stroke, fill, backgroundColor }, { classList }) =>
    classList.contains("line") ? stroke : classList.contains("area") ? fill : backgroundColor;
  return shown.map((one) => [colour(getComputedStyle(one), one), ground]);
}"""
WIDTHS = "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"


def luminance(colour: list[float]) -> float:
    channels = [value / 255 for value in colour[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[float], other: list[float]) -> float:
    """Return the contrast ratio of two colours, as WCAG defines it."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def parsed(colour: str) -> list[float]:
    return [float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]


def check_contrast(page: Page) -> None:
    texts: list[dict[str, Any]] = page.evaluate(VISIBLE_TEXTS)
    assert len(texts) > 10
    for text in texts:
        needed = LARGE_CONTRAST if text["size"] >= LARGE_PIXELS else TEXT_CONTRAST
        assert contrast(text["colour"], text["ground"]) >= needed, text
    for colour, ground in page.evaluate(LINES):
        assert contrast(parsed(colour), parsed(ground)) >= LARGE_CONTRAST, colour


def check_width(page: Page) -> None:
    needed, available = page.evaluate(WIDTHS)
    assert needed <= available


def test_contrast_is_that_of_wcag() -> None:
    assert contrast([0, 0, 0], [255, 255, 255]) == pytest.approx(21)
    assert contrast([118, 118, 118], [255, 255, 255]) == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize(("scheme", "size"), [*product(("light", "dark"), (DESKTOP, PHONE))], ids=str)
def test_every_answer_is_readable_and_fits(
    scheme: Literal["light", "dark"], size: dict[str, int], browser: Browser, site: Server
) -> None:
    with opened(browser, site, scheme=scheme, size=size) as page:
        page.locator("#card summary").click()
        for model in ("tagger", "passages", "words", "hostile", "embedder", "halver", "series", "forecaster", "speller"):
            choose(page, model)
            run(page)
            check_width(page)
            check_contrast(page)
        page.get_by_label("Token ids").fill("wrong")
        run(page)
        check_contrast(page)
        page.get_by_role("button", name="Start", exact=True).click()
        page.get_by_label("Token ids").fill("1, 2")
        page.get_by_role("button", name="Start", exact=True).click()
        expect(page.locator("#stream-facts")).to_be_visible()
        check_width(page)
        ground = parsed(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
        assert (luminance(ground) > 0.5) is (scheme == "light")


def test_keyboard_is_enough(browser: Browser, site: Server) -> None:
    with opened(browser, site) as page:
        page.wait_for_selector("#model-list button[aria-current]")
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the model")).to_be_focused()
        for _ in range(3):
            page.keyboard.press("Tab")
        focused = page.locator(":focus")
        assert focused.get_attribute("data-id") is not None
        page.keyboard.press("End")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        chosen = page.locator("#model-list button[aria-current]")
        assert chosen.get_attribute("data-id") == focused.get_attribute("data-id")
        page.locator("#editors textarea").focus()
        page.keyboard.press("Control+A")
        page.keyboard.type("how far is the sea")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#result :first-child").first).to_be_visible()
        expect(page.locator("#result-status")).not_to_be_empty()
        page.get_by_role("tab", selected=True).focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name="Python")).to_be_focused()
        expect(page.get_by_role("tab", name="Python")).to_have_attribute("aria-selected", "true")
        page.locator("#card summary").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#card-text")).to_be_visible()
        for control in page.locator(
            "button:visible, input:visible, textarea:visible, select:visible, a:visible, summary:visible"
        ).all():
            control.focus()
            outline = control.evaluate("(one) => (one.type === 'file' ? one.parentElement : one).matches(':focus-within')")
            assert outline


def test_every_control_has_a_name(page: Page) -> None:
    for model in ("series", "embedder", "speller"):
        choose(page, model)
        for control in page.get_by_role("button").or_(page.get_by_role("textbox")).or_(page.get_by_role("combobox")).all():
            name = control.evaluate(
                "(one) => one.labels?.[0]?.textContent || one.getAttribute('aria-label') || one.textContent"
            )
            assert name.strip(), control.evaluate("(one) => one.outerHTML")
        assert page.locator("svg:not([aria-label])").count() == 0
    levels = page.locator("h1, h2, h3").evaluate_all(
        "all => all.filter((one) => one.checkVisibility()).map((one) => one.tagName)"
    )
    assert levels[0] == "H1" and "H3" in levels


def test_hostile_names_and_cards_stay_text(page: Page) -> None:
    page.evaluate("() => { window.alert = () => { throw new Error('a script ran'); }; }")
    choose(page, "hostile")
    run(page)
    page.locator("#card").evaluate("(card) => { card.open = true; }")
    card = page.locator("#card-text")
    expect(card.locator("h3")).to_have_text(HOSTILE)
    assert page.locator("#work img, #work iframe, #work script, #work svg[onload], #models img").count() == 0
    assert HOSTILE in page.locator("#result").inner_text() and HOSTILE in page.locator("#model-description").inner_text()
    assert card.locator("td").all_inner_texts() == ["1", "<svg onload=alert(1)>"]
    links = card.locator("a").evaluate_all("all => all.map((one) => one.getAttribute('href'))")
    assert links == ["https://example.org/a_(b", "http://example.org/x.png"]
    assert "[run](javascript:alert(1))" in card.inner_text()
    check_width(page)


def test_links_of_cards_lead_only_to_web_pages(page: Page) -> None:
    text = "[a](https://example.org/x) [b](http://example.org) [c](data:text/html,x) [d](//example.org) [e](https://x y)"
    page.route("**/card?*", lambda route: route.fulfill(body=text, content_type="text/markdown"))
    page.locator("#card").evaluate("(card) => { card.open = true; }")
    choose(page, "words")
    expect(page.locator("#card-text a")).to_have_count(2)
    assert page.locator("#card-text a").evaluate_all("all => all.map((one) => [one.href, one.rel])") == [
        ["https://example.org/x", "noopener noreferrer"],
        ["http://example.org/", "noopener noreferrer"],
    ]


def test_card_that_cannot_be_had_is_explained(page: Page) -> None:
    page.route(
        "**/card?*", lambda route: route.fulfill(status=503, json={"error": "the service is busy", "code": "unavailable"})
    )
    page.locator("#card").evaluate("(card) => { card.open = true; }")
    choose(page, "tagger")
    expect(page.locator("#card-text").get_by_role("alert")).to_contain_text("the service is busy.")
    page.unroute_all()
    page.locator("#card-text").get_by_role("button", name="Try again").click()
    expect(page.locator("#card-text")).to_have_text("made up")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=str)
def test_a_thousand_models_are_listed_and_searched(size: dict[str, int], browser: Browser, site: Server) -> None:
    listed = site.client.get("/models").json()["models"]
    names = [f"model-{index:04d}-{HOSTILE if index % 100 == 0 else 'x' * (index % 120)}" for index in range(MANY)]
    many = [{**listed[index % len(listed)], "name": name, "aliases": [f"alias of {name}"]} for index, name in enumerate(names)]
    broken = [{"name": HOSTILE, "version": None, "ready": False, "reason": "its <b>weights</b> are missing"}]
    with opened(browser, site, "/docs", size=size) as page:
        page.route("**/models", lambda route: route.fulfill(json={"models": many, "unavailable": broken}))
        page.goto("/")
        expect(page.locator("#model-list button")).to_have_count(MANY)
        expect(page.locator("#model-count")).to_have_text(f"{MANY} models")
        texts = page.locator(".broken .model-name, .broken .model-note").all_text_contents()
        assert texts == [HOSTILE, "cannot be served: its <b>weights</b> are missing"]
        check_width(page)
        page.get_by_label("Find a model").fill("model-09")
        expect(page.locator("#model-list button")).to_have_count(100)
        box = page.locator("#model-list").bounding_box()
        assert box is not None and box["height"] <= 20 * size["height"]


def test_no_model_is_a_state_of_its_own(browser: Browser, site: Server) -> None:
    with opened(browser, site, "/docs") as page:
        page.route("**/models", lambda route: route.fulfill(json={"models": [], "unavailable": []}))
        page.goto("/")
        expect(page.locator("#model-list")).to_have_text("No model is served. Put one into the models folder.")
        expect(page.locator("#work")).to_be_hidden()
