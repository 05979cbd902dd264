"""Every input and every head is tried in a browser, and wrong inputs and refused requests are explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from tests.long.ui.browser import choose, run
from tests.models import LABELS
from tests.serving import Server


def type_input(page: Page, text: str, field: str = "Text") -> None:
    page.get_by_label(field, exact=True).fill(text)


def test_list_shows_every_model_and_what_it_does(page: Page, site: Server) -> None:
    served = site.client.get("/models").json()["models"]
    assert page.locator("#model-list button").count() == len(served)
    expect(page.locator("#model-count")).to_have_text(f"{len(served)} models")
    choose(page, "tagger")
    facts = page.locator("#model-facts").inner_text()
    for fact in ("text, up to 64 steps", "one of 3 labels for each token", "gru 5 (both directions)", "float32", "cpu"):
        assert fact in facts


def test_list_is_searched(page: Page) -> None:
    page.get_by_label("Find a model").fill("SENS")
    expect(page.locator("#model-list button")).to_have_count(1)
    expect(page.locator("#model-count")).to_contain_text("1 of")
    page.get_by_label("Find a model").fill("nothing like this")
    expect(page.locator("#model-list")).to_have_text("No model has this in its name.")


def test_classifier_shows_a_bar_for_each_class(page: Page, site: Server) -> None:
    choose(page, "words")
    type_input(page, "how far is the sea ?")
    answer = run(page)
    [output] = site.infer("words", ["how far is the sea ?"]).json()["outputs"]
    assert answer.splitlines()[:2] == [f"score {output['score']:.3f}", output["label"]]
    shown = page.locator(".bars .bar-label").all_inner_texts()
    assert shown == sorted(LABELS, key=lambda label: -output["scores"][label])
    assert page.locator(".bars .chosen .bar-label").inner_text() == output["label"]
    widths = page.eval_on_selector_all(".bars .bar", "bars => bars.map((bar) => Number(bar.style.getPropertyValue('--share')))")
    assert widths == pytest.approx(sorted(output["scores"].values(), reverse=True))


def test_several_classes_may_be_none(page: Page) -> None:
    choose(page, "topics")
    assert "no class" in run(page) and "score of at least 0.990" in page.locator("#result").inner_text()


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
    assert run(page) == "This input has no steps, so there is nothing to label."


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


def test_span_of_ids_is_marked(page: Page, site: Server) -> None:
    choose(page, "reader")
    type_input(page, "1, 2, 3, 4, 5", "Token ids")
    run(page)
    [output] = site.infer("reader", [[1, 2, 3, 4, 5]]).json()["outputs"]
    assert page.locator("#result mark").text_content() == " ".join("12345"[output["start"] : output["end"] + 1])


def test_next_tokens_are_listed(page: Page, site: Server) -> None:
    choose(page, "speller")
    type_input(page, "[1 2, 3]", "Token ids")
    run(page)
    [output] = site.infer("speller", [[1, 2, 3]]).json()["outputs"]
    assert page.locator(".bars .bar-label").all_inner_texts() == [f"token {id}" for id in output["ids"]]
    before = page.get_by_label("Token ids").input_value()
    page.get_by_role("button", name="Random ids").click()
    assert page.get_by_label("Token ids").input_value() != before


def test_next_tokens_of_a_text_are_words(page: Page, site: Server) -> None:
    choose(page, "writer")
    type_input(page, "how far is")
    run(page)
    [output] = site.infer("writer", ["how far is"]).json()["outputs"]
    words = ["[UNK]", "how", "far", "is", "the", "sea", "who", "was", "first", "?"]
    assert page.locator(".bars .bar-label").all_text_contents() == [f"{words[id]}  ({id})" for id in output["ids"]]


@pytest.mark.parametrize(
    ("model", "field", "first", "second"),
    [("embedder", "Text", "how far is it ?", "how far is it ?"), ("pairs", "Token ids", "1, 2", "3, 4, 5")],
)
def test_two_inputs_are_compared(model: str, field: str, first: str, second: str, page: Page) -> None:
    choose(page, model)
    type_input(page, first, field)
    type_input(page, second, "Second input")
    answer = run(page).splitlines()
    assert answer[0] == "cosine similarity" and float(answer[1].replace("−", "-")) == pytest.approx(
        1.0 if first == second else 0.0, abs=1e-6 if first == second else 1
    )
    assert page.locator("#result .strip").count() == 2
    type_input(page, "", "Second input")
    assert "Enter a second input to compare them." in run(page)
    assert page.locator("#result .strip").count() == 1


def test_vectors_of_steps_are_a_map(page: Page) -> None:
    choose(page, "halver")
    assert "23 steps from top to bottom, 5 numbers each" in run(page)
    assert page.locator("#result .heatmap rect").count() == 23 * 5


def test_values_are_shown_as_bars_or_alone(page: Page, site: Server) -> None:
    choose(page, "forecaster")
    run(page)
    assert page.locator("#result .bar-label").all_inner_texts() == ["value 1", "value 2"]
    choose(page, "single")
    type_input(page, "1, 2, 3", "Token ids")
    [output] = site.infer("single", [[1, 2, 3]]).json()["outputs"]
    shown = run(page).splitlines()
    assert shown[0] == "value" and float(shown[1].replace("−", "-")) == pytest.approx(output["value"], rel=0.01)


def test_series_is_pasted_uploaded_and_drawn(page: Page, tmp_path: Path) -> None:
    choose(page, "series")
    rows = page.get_by_label("Rows of numbers", exact=True)
    expect(page.get_by_text("48 steps of 2 numbers")).to_be_visible()
    rows.fill("a;b\n1;2\n3;4")
    expect(page.get_by_text("2 steps of 2 numbers")).to_be_visible()
    file = tmp_path / "rows.csv"
    file.write_text("x,y\n" + "\n".join(f"{step},{-step}" for step in range(20)))
    page.get_by_label("CSV file with rows of numbers").set_input_files(file)
    expect(page.get_by_text("20 steps of 2 numbers")).to_be_visible()
    before = rows.input_value().splitlines()[1:]
    page.get_by_label("Series to draw").select_option("series 2")
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
    expect(page.get_by_text("48 steps of 2 numbers")).to_be_visible()


def test_forecast_continues_the_series(page: Page, site: Server) -> None:
    choose(page, "series")
    page.get_by_label("Rows of numbers", exact=True).fill("[[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]")
    page.get_by_label("Forecast").select_option("24 rows")
    run(page)
    sequence = [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]
    [output] = site.infer("series", [sequence]).json()["outputs"]
    shown = [float(text.replace("−", "-")) for text in page.locator("#result .values li").all_inner_texts()]
    assert shown == pytest.approx(output["value"], rel=0.01)
    label = page.locator("#result .plot svg").get_attribute("aria-label")
    assert label is not None and "3 rows of the input and 24 rows that the model adds" in label
    assert page.locator("#result .dashed").count() == 2


@pytest.mark.parametrize(
    ("model", "field", "text", "message"),
    [
        ("speller", "Token ids", "1, 2, x", "x is no token id of this model: use whole numbers from 0 to 11."),
        ("speller", "Token ids", "12", "12 is no token id of this model"),
        ("series", "Rows of numbers", "1, 2\n3", "Line 2 has 1 number and this model takes 2."),
        ("series", "Rows of numbers", "1, 2\n3, four", "Line 2 has something that is no number."),
        ("series", "Rows of numbers", "[[1, 2", "This begins like JSON and is none"),
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


@pytest.mark.parametrize(
    ("status", "code", "title"), [(429, "quota_exceeded", "Too many requests"), (503, "overloaded", "Not available now")]
)
def test_refused_request_is_tried_again_after_the_wait(status: int, code: str, title: str, page: Page) -> None:
    refusals = [1]

    def answer(route: Route) -> None:
        if not refusals:
            route.continue_()
            return
        body = json.dumps({"error": f"too much: retry later {code}", "code": code})
        route.fulfill(status=status, body=body, headers={"retry-after": str(refusals.pop())})

    page.route("**/infer", answer)
    choose(page, "words")
    run(page)
    alert = page.get_by_role("alert")
    assert title in alert.inner_text() and f"too much: retry later {code}." in alert.inner_text()
    again = alert.get_by_role("button")
    expect(again).to_be_enabled()
    assert again.inner_text() == "Try again"
    again.click()
    expect(page.locator("#result .bars")).to_be_visible()


def test_answers_that_are_no_numbers_are_said_to_be_so(page: Page) -> None:
    outputs = {
        "words": {"label": "far", "score": None, "scores": {"near": None, "far": None, "unknown": None}},
        "single": {"value": None},
        "embedder": {"embedding": [None, 1.0]},
        "halver": {"sequence": []},
    }
    page.route(
        "**/infer", lambda route: route.fulfill(json={"outputs": [outputs[json.loads(route.request.post_data or "")["model"]]]})
    )
    for model in outputs:
        choose(page, model)
        run(page)
        assert page.locator("#result .empty").inner_text().endswith("."), model
        expect(page.locator("#waterfall")).to_contain_text("did not report the stages")


def test_stages_of_the_last_request_follow_each_other(page: Page) -> None:
    choose(page, "words")
    run(page)
    names = page.locator(".waterfall .stage").all_inner_texts()
    assert names == ["parse", "channel", "queue", "stage in", "device wait", "compute", "stage out", "reply", "encode", "other"]
    spans = page.eval_on_selector_all(
        ".waterfall .span",
        "all => all.map((one) => ['--begin', '--share'].map((name) => Number(one.style.getPropertyValue(name))))",
    )
    ends = [begin + share for begin, share in spans]
    assert [begin for begin, _ in spans[1:]] == pytest.approx(ends[:-1]) and ends[-1] == pytest.approx(1)
