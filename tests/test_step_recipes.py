"""The recipes with an output per step, on tiny sets: tags, language models and spans, trained, served, evaluated and in the tables."""

from __future__ import annotations

import importlib
import json
import math
import random
import shutil
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from service.modeling import spec
from tests.serving import Server, serving

pytestmark = pytest.mark.usefixtures("examples")

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("sru", "qrnn", "lstm", "gru", "cnn", "tcn")
SETS = {"tags": "hidden", "text": "hidden", "spans": "facts"}
SCRIPTS = {"tags": "train_tags", "text": "train_language", "spans": "train_spans"}
SMALL = ("--width", "8", "--hidden", "6", "--epochs", "2")
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def step_sets() -> Any:
    return importlib.import_module("training.step_sets")


@pytest.fixture(scope="module")
def tasks() -> Any:
    return importlib.import_module("training.step_tasks").TASKS


@pytest.fixture(scope="module")
def recipes() -> Any:
    return importlib.import_module("step_results").RECIPES


@pytest.fixture(scope="module")
def markov() -> Any:
    return importlib.import_module("training.hidden_markov")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated sets, with 200 examples to train on."""
    folder = tmp_path_factory.mktemp("data")
    assert importlib.import_module("make_sets").main([str(folder), "--quick"]) == 0
    return folder


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with a model of each task and family."""
    models = tmp_path_factory.mktemp("models")
    for (kind, name), family in product(SETS.items(), FAMILIES):
        script = importlib.import_module(SCRIPTS[kind])
        recipe = importlib.import_module("step_results").RECIPES[kind]
        line = ["--data", str(data), "--set", name, "--encoder", family, "--models", str(models), *SMALL]
        step_recipe = importlib.import_module("training.step_recipe")
        assert script.__doc__ and step_recipe.main(recipe, name, [*line, "--results", str(models / "results.jsonl")]) == 0
    return models


@pytest.fixture(scope="module")
def server(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(trained, tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture(scope="module")
def service(server: Server) -> Any:
    """The running service, as a client sees it."""
    return importlib.import_module("training.service").Service(server.address)


def expected(recipes: Any, trained: Path, data: Path, step_sets: Any, kind: str, family: str, test: list[Any]) -> list[Any]:
    """Return PyTorch's answers with the stored weights and the padding of a batch."""
    recipe = recipes[kind]
    settings = next(
        record["settings"]
        for record in importlib.import_module("training.records").read(trained / "results.jsonl")
        if (record["task"], record["encoder"]) == (kind, family)
    )
    settings = importlib.import_module("training.step_fitting").Settings(**settings)
    train = step_sets.read_part(data, SETS[kind], kind, "train")
    prepared = recipe.prepare([train, [], test], settings)
    model = importlib.import_module("training.step_model").StepModel(
        family, prepared.vocabulary, settings.width, settings.hidden, prepared.outputs, causal=recipe.causal
    )
    model.eval().load(trained / f"{SETS[kind]}-{kind}-{family}" / "1")
    [batch] = importlib.import_module("training.step_fitting").batches(prepared.parts[2], len(test))
    with torch.no_grad():
        scores = model(batch.inputs, batch.lengths)
    rows = zip(scores, batch.lengths, test, strict=True)
    return [recipe.answer(each[:length], example, prepared) for each, length, example in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_tags_of_the_service_are_those_of_the_model(
    family: str, recipes: Any, trained: Path, data: Path, step_sets: Any, tasks: Any, service: Any
) -> None:
    test = step_sets.read_part(data, "hidden", "tags", "test")
    answers = tasks["tags"].ask(service, f"hidden-tags-{family}", test)
    right = expected(recipes, trained, data, step_sets, "tags", family, test)
    pairs = [pair for labels, others in zip(answers, right, strict=True) for pair in zip(labels, others, strict=True)]
    assert sum(label != other for label, other in pairs) <= 0.01 * len(pairs), "close scores may round differently"


@pytest.mark.parametrize("family", FAMILIES)
def test_language_model_gives_the_same_chances_byte_by_byte(
    family: str, recipes: Any, trained: Path, data: Path, step_sets: Any, tasks: Any, service: Any
) -> None:
    """Each line goes through a session, one byte in a chunk."""
    test = step_sets.read_part(data, "hidden", "text", "test")[:5]
    answers = tasks["text"].ask(service, f"hidden-text-{family}", test)
    for answer, right in zip(answers, expected(recipes, trained, data, step_sets, "text", family, test), strict=True):
        np.testing.assert_allclose(answer, right, atol=ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_spans_of_the_service_are_those_of_the_model(
    family: str, recipes: Any, trained: Path, data: Path, step_sets: Any, tasks: Any, service: Any
) -> None:
    test = step_sets.read_part(data, "facts", "spans", "test")
    answers = tasks["spans"].ask(service, f"facts-spans-{family}", test)
    right = expected(recipes, trained, data, step_sets, "spans", family, test)
    assert sum(answer == other for answer, other in zip(answers, right, strict=True)) >= len(test) - 1


@pytest.mark.parametrize("kind", SETS)
def test_card_and_record_have_what_was_measured(kind: str, trained: Path, recipes: Any) -> None:
    for record in importlib.import_module("training.records").read(trained / "results.jsonl"):
        if record["task"] != kind:
            continue
        folder = trained / f"{SETS[kind]}-{kind}-{record['encoder']}" / "1"
        card = (folder / spec.CARD).read_text()
        figure = recipes[kind].task.figure
        assert "$" not in card and f"{figure} {record['stored'][figure]:.2f}" in card
        assert f"--set {SETS[kind]} --encoder {record['encoder']} --width 8 --hidden 6" in card
        assert record["bytes"] == sum(file.stat().st_size for file in folder.iterdir()) and record["test_examples"] == 20


def test_evaluation_prints_each_model_and_the_optimum(
    service: Any, data: Path, step_sets: Any, capsys: pytest.CaptureFixture[str], trained: Path
) -> None:
    evaluate = importlib.import_module("evaluate_steps")
    assert evaluate.main(["tags", "--data", str(data), "--url", service.url]) == 0
    printed = capsys.readouterr().out
    assert all(f"| hidden-tags-{family} |" in printed for family in FAMILIES)
    assert f"| best possible | {step_sets.optimum(data, 'hidden', 'tags')['accuracy']:.2f} |" in printed
    line = ["text", "--data", str(data), "--limit", "2", "--model", "hidden-text-gru", "--url", service.url]
    assert evaluate.main(line) == 0
    printed = capsys.readouterr().out
    assert "| model, 2 examples | perplexity | s |" in printed and "best possible" not in printed
    assert evaluate.main(["text", "--data", str(data), "--url", "http://127.0.0.1:9"]) == 1
    assert evaluate.main(["spans", "--data", str(data), "--set", "hidden"]) == 2
    assert "hidden.test.spans" in capsys.readouterr().err


def test_recipe_without_its_set_explains_the_files(recipes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step_recipe = importlib.import_module("training.step_recipe")
    assert step_recipe.main(recipes["spans"], "facts", ["--data", str(tmp_path), "--models", str(tmp_path)]) == 2
    assert "facts.train.spans" in (error := capsys.readouterr().err) and "make_sets.py" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_beam_search_forks_sessions(family: str, service: Any, server: Server, tasks: Any) -> None:
    """The logarithm of a found line equals that of the line sent alone, the first line is the best, and no session stays open."""
    generate = importlib.import_module("generate")
    model, open_before = f"hidden-text-{family}", server.metric("seqserve_sessions")
    found = generate.search(generate.Writer(service, model), "", 6, 3)
    assert len(found) == 3 and len({line.text for line in found}) == 3
    assert [line.mean for line in found] == sorted((line.mean for line in found), reverse=True)
    alone = tasks["text"].ask(
        service, model, [line.text.decode("latin-1") for line in found if max(line.text, default=0) < 128]
    )
    for answer, line in zip(alone, (line for line in found if max(line.text, default=0) < 128), strict=True):
        sums = (sum(answer), sum(answer[:-1]))  # of an ended line, and of a line that was cut
        assert any(line.logarithm == pytest.approx(total, abs=ROUNDING * 10) for total in sums)
    assert server.metric("seqserve_sessions") == open_before


class Chain:
    """A service with a language model of three bytes, in which the probabilities of a byte depend on the previous byte."""

    chances: ClassVar[dict[int, dict[int, float]]] = {
        10: {97: 0.5, 98: 0.4, 10: 0.1},
        97: {97: 0.05, 98: 0.85, 10: 0.1},
        98: {97: 0.3, 98: 0.1, 10: 0.6},
    }

    def __init__(self) -> None:
        self.sessions: dict[str, bytes] = {}

    def fetch_json(self, path: str, body: Any) -> Any:
        if path == "/infer":
            line = self.sessions[body["session"]] = self.sessions.get(body["session"], b"") + bytes(body["inputs"][0])
            chances = self.chances[line[-1]]
            return {"outputs": [{"ids": list(chances), "scores": list(chances.values())}]}
        self.sessions[body["session"]] = self.sessions[path.split("/")[2]]
        return body

    def delete(self, path: str) -> None:
        del self.sessions[path.split("/")[2]]

    def logarithm(self, line: bytes) -> float:
        return sum(math.log(self.chances[before][after]) for before, after in pairwise(b"\n" + line + b"\n"))


def test_wide_beam_search_finds_the_best_of_all_lines() -> None:
    generate, chain = importlib.import_module("generate"), Chain()
    lines = [bytes(each) for length in range(4) for each in product(b"ab", repeat=length)]
    best = sorted(lines, key=lambda line: chain.logarithm(line) / (len(line) + 1), reverse=True)
    found = generate.search(generate.Writer(chain, "chain"), "", 4, 40)
    assert [line.text for line in found] == best and chain.sessions == {}
    assert [line.logarithm for line in found] == pytest.approx([chain.logarithm(line) for line in best])


def test_narrow_beam_search_keeps_the_most_probable_beams() -> None:
    """Two beams also find the line of a greedy choice of each byte, and a fork does not change the session that it copies."""
    generate, chain = importlib.import_module("generate"), Chain()
    writer = generate.Writer(chain, "chain")
    assert generate.search(writer, "", 9, 2)[0].text == b"ab" and chain.sessions == {}
    beam = writer.begin("a")
    copy = writer.extend(beam, 98, writer.fork(beam.session))
    assert (chain.sessions[beam.session], chain.sessions[copy.session]) == (b"\na", b"\nab")


def test_samples_follow_the_seed_and_begin_with_the_text(service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    generate = importlib.import_module("generate")
    line = ["--model", "hidden-text-lstm", "--text", "abc", "--lines", "2", "--longest", "8", "--url", service.url]
    printed = []
    for seed in ("1", "1", "2"):
        assert generate.main([*line, "--seed", seed]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    assert printed[0].startswith("abc") and generate.main([*line, "--beams"]) == 0
    assert "abc" in capsys.readouterr().out.splitlines()[0]
    assert generate.main([*line[:-1], "http://127.0.0.1:9"]) == 1


@pytest.mark.parametrize("family", ["gru", "cnn", "tcn"])
def test_training_learns_labels_that_depend_on_the_next_word(family: str, recipes: Any, step_sets: Any, tmp_path: Path) -> None:
    """The label of a word is the word after it, so only a model that reads ahead can know it."""
    source = random.Random(3)
    examples = []
    for _ in range(300):
        words = source.choices("xyz", k=source.randint(2, 12))
        examples.append(step_sets.TaggedWords(words, [*words[1:], "end"]))
    step_sets.write(tmp_path, "next", "tags", [examples[:240], examples[240:260], examples[260:]])
    step_recipe = importlib.import_module("training.step_recipe")
    settings = importlib.import_module("training.step_fitting").Settings(
        encoder=family, width=8, hidden=16, epochs=12, batch=16, rate=0.02, dropout=0.0, patience=12
    )
    folder = tmp_path / "models" / "next" / "1"
    record = step_recipe.run(recipes["tags"], tmp_path, "next", settings, folder, torch.device("cpu"))
    assert record["stored"]["accuracy"] > 95


def test_training_is_reproducible(recipes: Any, data: Path, step_sets: Any) -> None:
    step_recipe = importlib.import_module("training.step_recipe")
    settings = importlib.import_module("training.step_fitting").Settings(encoder="sru", width=6, hidden=3, epochs=2)
    prepared = recipes["text"].prepare(step_sets.read(data, "hidden", "text"), settings)
    weights, repeated = (
        step_recipe.train(recipes["text"], prepared, settings, torch.device("cpu")).model.tensors() for _ in range(2)
    )
    assert all(torch.equal(weights[name], repeated[name]) for name in weights)


def test_optimum_of_the_hidden_markov_model_is_exact(markov: Any) -> None:
    """Posteriors and probabilities equal the sums over all sequences of states."""
    model, words = markov.HiddenMarkovModel.random(), list("ajbd")
    joint = np.zeros((len(words), markov.STATES))
    for states in product(range(markov.STATES), repeat=len(words)):
        chance = model.start[states[0]]
        for step, state in enumerate(states):
            chance *= model.emits[state, markov.WORDS.index(words[step])]
            chance *= model.moves[state, states[step + 1]] if step + 1 < len(states) else 1.0
        joint[range(len(words)), states] += chance
    np.testing.assert_allclose(model.posterior(words), joint / joint.sum(axis=1, keepdims=True), atol=1e-12)
    total = math.log(joint[0].sum() * (1 - markov.STOP) ** (len(words) - 1) * markov.STOP)
    assert sum(model.logarithms(words)) == pytest.approx(total)
    np.testing.assert_allclose(model.forward(words)[0][-1], joint[-1] / joint[-1].sum(), atol=1e-12)


def test_best_figures_are_better_than_the_baselines(data: Path, step_sets: Any, markov: Any, tasks: Any) -> None:
    """They hold on other sequences of the model too."""
    baseline = importlib.import_module("training.baselines").baseline
    for kind in ("tags", "text"):
        train, _, test = step_sets.read(data, "hidden", kind)
        [simple] = baseline(kind, train, test).values()
        best = step_sets.optimum(data, "hidden", kind)
        assert (simple["accuracy"] < best["accuracy"]) if kind == "tags" else (simple["perplexity"] > best["perplexity"])
    assert baseline("spans", [], []) == {}
    model, generator = markov.HiddenMarkovModel.random(), np.random.default_rng(0)
    samples = [model.sample(generator) for _ in range(300)]
    accuracy = tasks["tags"].quality(samples, [model.best_labels(each.words) for each in samples])["accuracy"]
    certain = [model.posterior(each.words).max(axis=1) for each in samples]
    assert accuracy == pytest.approx(100 * np.concatenate(certain).mean(), abs=2)


def test_facts_have_one_answer() -> None:
    """The span is the text that the grammar inserted, and only the sentence of the question has the named words."""
    facts, generator = importlib.import_module("training.facts"), random.Random(0)
    for _ in range(200):
        question = facts.question(generator)
        words = question.passage.split()
        answer, asked = words[question.start : question.end + 1], question.question.split()
        [named] = [word for word in asked if word in facts.PEOPLE or word in facts.THINGS]
        assert words.count(named) == 1
        expected = {"what": facts.THINGS, "where": facts.ROOMS, "who": facts.PEOPLE}[asked[0]]
        assert answer[-1] in expected and len(answer) == {"what": 3, "where": 2, "who": 1}[asked[0]]
        between = words[min(words.index(named), question.start) : max(words.index(named), question.end)]
        assert "." not in between, "the answer is in the same sentence"


def test_verses_become_words_with_points(step_sets: Any, tmp_path: Path) -> None:
    (tmp_path / "kjv.txt").write_text(
        "".join(f"Ge1:{number} And God said, Let there be (light): is it? yes!\n" for number in range(1, 1203))
    )
    assert (
        importlib.import_module("make_sets").main([str(tmp_path / "sets"), "--quick", "--kjv", str(tmp_path / "kjv.txt")]) == 0
    )
    train, development, test = step_sets.read(tmp_path / "sets", "kjv", "tags")
    assert [len(part) for part in (train, development, test)] == [202, 500, 500]
    assert test[0].words == ["and", "god", "said", "let", "there", "be", "light", "is", "it", "yes"]
    assert test[0].labels == ["none", "none", "comma", "none", "none", "none", "colon", "none", "question", "exclamation"]
    assert [len(part) for part in step_sets.read(tmp_path / "sets", "kjv", "text")] == [802, 200, 200]


def test_sets_are_read_as_written(step_sets: Any, tmp_path: Path) -> None:
    examples = {
        "tags": [step_sets.TaggedWords(["a", "é"], ["X", "Y"]), step_sets.TaggedWords(["b"], ["X"])],
        "text": ["a line", "", "é"],
        "spans": [step_sets.Question("who ?", 'a "b" c', 1, 2)],
    }
    for kind, part in examples.items():
        step_sets.write(tmp_path, "set", kind, [part, part[:1], []])
        assert step_sets.read(tmp_path, "set", kind) == [part, part[:1], []]
    assert step_sets.optimum(tmp_path, "set", "tags") == {}
    (tmp_path / "set.test.tags").write_text("1 000\tNUM\n1\u00a0001\tNUM", "utf-8")
    assert step_sets.read_part(tmp_path, "set", "tags", "test") == [step_sets.TaggedWords(["1_000", "1_001"], ["NUM", "NUM"])]


def test_input_of_spans_marks_the_words_of_the_question(step_sets: Any) -> None:
    tasks = importlib.import_module("training.step_tasks")
    question = step_sets.Question("who moved the lamp ?", "Anna took The red lamp .", 0, 0)
    assert tasks.joined(question) == "who moved the lamp ? [sep] Anna took The* red lamp* ."
    assert tasks.joined(question).split()[tasks.passage_start(question) + question.start] == "Anna"


def test_figures_of_quality(tasks: Any, step_sets: Any) -> None:
    tagged = [step_sets.TaggedWords(list("abcd"), ["X", "X", "Y", "Y"])]
    assert tasks["tags"].quality(tagged, [["X", "Y", "Y", "Y"]]) == pytest.approx(
        {"accuracy": 75.0, "f1": 100 * (2 / 3 + 4 / 5) / 2}
    )
    assert tasks["text"].quality(["a"], [[math.log(0.5), math.log(0.125)]]) == pytest.approx({"perplexity": 4.0})
    questions = [step_sets.Question("", "", 2, 3), step_sets.Question("", "", 5, 5)]
    assert tasks["spans"].quality(questions, [(2, 3), (4, 6)]) == pytest.approx({"exact": 50.0, "f1": 75.0})


@pytest.mark.slow
def test_results_runs_everything_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model is trained, served and measured; a second run has nothing to do. Figures of quick trials are not in the tables.

    Without the model, it is trained again only for a figure that is missing.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    results, records = importlib.import_module("step_results"), importlib.import_module("training.records")
    page = tmp_path / "page.md"
    marks = "".join(f"<!-- {kind} results -->\nold\n<!-- end of {kind} results -->\n" for kind in SETS)
    page.write_text(f"before\n{marks}after\n")
    line = ["--data", str(data), "--sets", "hidden/tags", "--encoders", "cnn", "--jobs", "1", "--seconds", "0.2", "--quick"]
    line += ["--models", str(tmp_path / "models"), "--results", str(tmp_path / "results.jsonl"), "--page", str(page)]
    assert results.main(line) == 0
    measured = records.read(tmp_path / "results.jsonl")
    assert [record["kind"] for record in measured] == ["reference", "reference", "training", "served", "speed", "speed"]
    assert measured[3]["served"] == pytest.approx(measured[2]["stored"], abs=1)
    assert page.read_text() == f"before\n{marks}after\n".replace("old", importlib.import_module("training.pages").EMPTY)
    capsys.readouterr()
    for seconds in ("0.2", "0"):
        assert results.main([*line, "--seconds", seconds]) == 0
    assert records.read(tmp_path / "results.jsonl") == measured and capsys.readouterr().out == ""
    shutil.rmtree(tmp_path / "models")
    assert results.main(line) == 0
    assert records.read(tmp_path / "results.jsonl") == measured, "nothing is missing, so nothing is trained again"
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in measured[:4]))
    assert results.main(line) == 0
    kinds = [record["kind"] for record in records.read(tmp_path / "results.jsonl")[4:]]
    assert kinds == ["training", "served", "speed", "speed"], "the speed is missing, and so is the model"


def test_table_has_figures_devices_and_references() -> None:
    table = importlib.import_module("training.step_table")
    common = {"task": "text", "set": "kjv", "quick": False, "date": "2026-01-02", "processor": "P"}
    family = {**common, "encoder": "sru"}
    gpu = {"device": "cuda:0", "gpu": "G"}
    records = [
        {**family, "kind": "training", "trained": {"perplexity": 9.0}, "training_seconds": 9.0, "bytes": 1},
        {**family, "kind": "training", "trained": {"perplexity": 4.0}, "training_seconds": 10.4, "bytes": 2000},
        {**family, "kind": "served", "device": "cpu", "served": {"perplexity": 4.25}},
        {**family, "kind": "speed", "device": "cpu", "callers": 1, "p50_ms": 0.5, "texts_per_second": 1000.0},
        {**family, "kind": "speed", "device": "cpu", "callers": 64, "p50_ms": 4.0, "texts_per_second": 9000.0},
        {**family, "kind": "speed", "callers": 1, "p50_ms": 0.25, "texts_per_second": 2000.0, **gpu},
        {**common, "kind": "reference", "encoder": "pairs", "trained": {"perplexity": 8.0}},
        {**family, "kind": "training", "set": "trial", "quick": True, "trained": {"perplexity": 1.0}},
    ]
    lines = list(table.lines("text", records))
    assert "| kjv | sru | 4.00 | 10 | 2,000 | 4.25 | 0.50 | 9,000 | – | 0.25 | 2,000 |" in lines
    assert "| kjv | pairs | 8.00 | | | | | | | | |" in lines
    assert {line.count("|") for line in lines if line.startswith("|")} == {12}
    assert "Trained on P, from 2026-01-02 to 2026-01-02." in lines and not any("trial" in line for line in lines)
    assert any(line.startswith("Served on P; P, G, from") for line in lines)


def test_readme_has_the_tables_of_the_results_file(tmp_path: Path) -> None:
    table, records = importlib.import_module("training.step_table"), importlib.import_module("training.records")
    copy = tmp_path / "README.md"
    copy.write_text((ROOT / "examples" / "README.md").read_text())
    table.write(copy, records.read(ROOT / "examples" / "step-results.jsonl"))
    assert copy.read_text() == (ROOT / "examples" / "README.md").read_text()
    assert all(f"<!-- end of {kind} results -->" in copy.read_text() for kind in SETS)


def test_known_sets_have_terms_in_their_cards(trained: Path) -> None:
    assert "hidden Markov model" in (trained / "hidden-tags-sru" / "1" / spec.CARD).read_text()
    assert "small grammar" in (trained / "facts-spans-sru" / "1" / spec.CARD).read_text()
    described = json.loads(json.dumps(spec.read(trained / "hidden-text-qrnn" / "1").model_dump()))
    assert described["fold"] == "never" and described["head"]["top"] == 256
