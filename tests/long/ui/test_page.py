"""The page in a browser: every input and head, wrong inputs, streams, its looks, a keyboard, and hostile names."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.long.ui.conftest import DESKTOP, HOSTILE, PHONE, choose, opened, run
from tests.models import LABELS
from tests.serving import Server, eventually


def type_input(page: Page, text: str, field: str = "Text") -> None:
    page.get_by_label(field, exact=True).fill(text)


def test_tokens_have_the_colours_of_their_labels(page: Page, site: Server) -> None:
    choose(page, "tagger")
    type_input(page, "how far,  is\nthe sea?")
    run(page)
    tokens = page.locator(".token")
    assert tokens.locator(".token-text").all_inner_texts() == ["how", "far", ",", "is", "the", "sea", "?"]
    [output] = site.infer("tagger", ["how far,  is\nthe sea?"]).json()["outputs"]
    assert tokens.locator(".token-label").all_inner_texts() == output["labels"]
    classes = [f"token c{LABELS.index(label)}" for label in output["labels"]]
    assert tokens.evaluate_all("all => all.map((one) => one.className)") == classes
    type_input(page, "")
    answer = run(page)
    assert "The input is empty" in answer and "This input has no steps, so there is nothing to label." in answer


def test_span_is_marked_in_its_text(page: Page, site: Server) -> None:
    text = "𝒳 how far ,\tis the «sea» who was first ?"
    choose(page, "passages")
    type_input(page, text)
    run(page)
    [output] = site.infer("passages", [text]).json()["outputs"]
    body = {"model": "passages", "inputs": [text]}
    [tokens] = site.client.post("/tokens", json=body).json()["outputs"]
    first, last = tokens["offsets"][output["start"]][0], tokens["offsets"][output["end"]][1]
    assert page.locator("#result mark").text_content() == text[first:last]
    assert page.locator("#result .passage").text_content() == text


def test_series_is_pasted_uploaded_and_drawn(page: Page, tmp_path: Path) -> None:
    choose(page, "series")
    rows = page.get_by_label("Rows of numbers", exact=True)
    expect(page.get_by_text("48 steps of depth, speed")).to_be_visible()
    rows.fill("a;b\n1;2\n3;4")
    expect(page.get_by_text("2 steps of depth, speed")).to_be_visible()
    file = tmp_path / "rows.csv"
    file.write_text("x,y\n" + "\n".join(f"{step},{-step}" for step in range(20)))
    page.get_by_label("CSV file with rows of numbers").set_input_files(file)
    expect(page.get_by_text("20 steps of depth, speed")).to_be_visible()
    before = rows.input_value().splitlines()[1:]
    page.get_by_label("Series to draw").select_option("speed")
    box = page.locator(".pad svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 1, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 30, steps=4)
    page.mouse.up()
    drawn = [list(map(float, line.split(","))) for line in rows.input_value().splitlines()]
    assert [first for first, _ in drawn] == [float(line.split(",")[0]) for line in before]
    assert len({second for _, second in drawn}) == 1 and drawn[0][1] > 0
    page.get_by_role("button", name="Sample").click()
    expect(page.get_by_text("48 steps of depth, speed")).to_be_visible()
    run(page)
    assert page.locator("#result .values .hint").all_inner_texts() == ["depth", "speed"]


def test_bars_of_negative_values_are_left_of_zero(page: Page) -> None:
    places = page.evaluate("""async () => {
      const { drawAnswer } = await import("/ui/heads.js");
      const [bars] = drawAnswer({ input: {}, head: { kind: "regress" } }, [{ value: [-1, 3] }], [[]]);
      const styles = [...bars.querySelectorAll(".bar")].map((one) => one.style);
      return styles.map((style) => ["--from", "--share", "--zero"].map((name) => Number(style.getPropertyValue(name))));
    }""")
    assert places == [[0, 0.25, 0.25], [0.25, 0.75, 0.25]]


@pytest.mark.parametrize(
    ("model", "field", "text", "message"),
    [
        ("speller", "Token ids", "1, 2, x", "x is no token id of this model: use whole numbers from 0 to 11."),
        ("speller", "Token ids", "12", "12 is no token id of this model"),
        ("series", "Rows of numbers", "1, 2\n3", "Line 2 has 1 number and this model takes 2."),
        ("series", "Rows of numbers", "[[1, 2", "This begins like JSON and is none"),
        ("series", "Rows of numbers", "speed;depth\n1;2", "this model takes depth, speed, in this order"),
        ("words", "Text", "sea " * 65, "words takes at most 64"),
        ("halver", "Rows of numbers", "1, 2", "needs at least 3"),
    ],
)
def test_wrong_input_is_explained(model: str, field: str, text: str, message: str, page: Page) -> None:
    choose(page, model)
    type_input(page, text, field)
    run(page)
    assert message in page.get_by_role("alert").inner_text()
    assert page.get_by_role("button", name="Try again").count() == 0
    expect(page.locator("#waterfall")).to_contain_text("was not answered")
    if model in ("words", "halver"):
        expect(page.locator("#code")).to_contain_text("/infer")
    else:
        expect(page.locator("#code")).to_contain_text(message)
        expect(page.get_by_role("button", name="Copy")).to_be_disabled()
        assert set(page.locator(".pad path.line").evaluate_all("all => all.map((one) => one.getAttribute('d'))")) <= {""}


# Streams.


def start(page: Page, model: str, rate: int = 40, size: int = 1) -> None:
    choose(page, model)
    page.locator("#stream-size").fill(str(size))
    page.locator("#stream-rate").fill(str(rate))
    page.get_by_role("button", name="Start", exact=True).click()


def await_steps(page: Page, count: int) -> None:
    page.wait_for_function("count => parseInt(document.getElementById('stream-facts')?.textContent) >= count", arg=count)


def test_answers_are_drawn_as_they_come(page: Page) -> None:
    start(page, "sensors")
    await_steps(page, 12)
    expect(page.locator("#stream-status")).to_have_text("Streaming")
    answered = page.locator("#stream-view figure", has_text="answered")
    assert answered.locator("path.line").count() == 3
    lengths = answered.locator("path.line").evaluate_all("all => all.map((one) => one.getAttribute('d').split('L').length)")
    assert min(lengths) >= 3
    assert "answered in" in page.locator("#stream-facts").inner_text()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#stream-status")).to_have_text("Stopped")


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


# Looks.

TEXT_CONTRAST, LARGE_CONTRAST, LARGE_PIXELS = 4.5, 3.0, 24
"""WCAG 2.2, level AA: for text, and for large text."""
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
  const elements = [...document.body.querySelectorAll("*")].filter(
    (one) => one.checkVisibility() && [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()));
  return elements.map((one) => {
    const style = getComputedStyle(one);
    return { text: one.textContent.slice(0, 40), colour: rgba(style.color), ground: ground(one), size: parseFloat(style.fontSize) };
  });
}"""
WIDTHS = "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"


def luminance(colour: list[float]) -> float:
    channels = [value / 255 for value in colour[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def check_looks(page: Page) -> None:
    """Check that nothing is wider than the window, and the contrast of each text, as WCAG defines it."""
    needed, available = page.evaluate(WIDTHS)
    assert needed <= available
    texts: list[dict[str, Any]] = page.evaluate(VISIBLE_TEXTS)
    assert len(texts) > 10
    for text in texts:
        darker, lighter = sorted((luminance(text["colour"]), luminance(text["ground"])))
        wanted = LARGE_CONTRAST if text["size"] >= LARGE_PIXELS else TEXT_CONTRAST
        assert (lighter + 0.05) / (darker + 0.05) >= wanted, text


@pytest.mark.parametrize(("scheme", "size"), [("light", PHONE), ("dark", DESKTOP)], ids=str)
def test_every_answer_is_readable_and_fits(
    scheme: Literal["light", "dark"], size: dict[str, int], browser: Browser, site: Server
) -> None:
    with opened(browser, site, scheme=scheme, size=size) as page:
        page.locator("#card summary").click()
        for model in ("tagger", "passages", "words", "hostile", "embedder", "halver", "series", "forecaster", "speller"):
            choose(page, model)
            run(page)
            check_looks(page)
        page.get_by_label("Token ids").fill("wrong")
        run(page)
        check_looks(page)
        page.get_by_label("Token ids").fill("1, 2")
        page.get_by_role("button", name="Start", exact=True).click()
        expect(page.locator("#stream-facts")).to_be_visible()
        check_looks(page)


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
        for control in page.locator(
            "button:visible, input:visible, textarea:visible, select:visible, a:visible, summary:visible"
        ).all():
            control.focus()
            outline = control.evaluate("(one) => (one.type === 'file' ? one.parentElement : one).matches(':focus-within')")
            assert outline


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
    check_looks(page)
