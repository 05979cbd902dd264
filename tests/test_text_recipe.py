"""The text classification recipe, on tiny sets: training, the model folder, the service, the results file and the table."""

from __future__ import annotations

import importlib
import json
import math
import re
import shutil
import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.modeling import spec
from tests.serving import serving

pytestmark = pytest.mark.usefixtures("examples")

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("sru", "qrnn", "lstm", "gru", "cnn", "tcn")
SMALL = ("--width", "12", "--hidden", "6", "--epochs", "3", "--batch", "10", "--patience", "2")
ROUNDING = 1e-4
COLOURS = {"warm": ("red", "orange", "yellow"), "cold": ("blue", "green", "violet")}
FILLERS = ("the", "a", "is", "of", "sea", "2", "sun", ".")


@pytest.fixture(scope="module")
def recipe() -> Any:
    return importlib.import_module("train_text")


@pytest.fixture(scope="module")
def text_sets() -> Any:
    return importlib.import_module("training.text_sets")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the set `colours`, one file, and the same as `parts`, three files. A text is of the label of its colour."""
    folder = tmp_path_factory.mktemp("data")
    lines = colour_lines(120)
    (folder / "colours.txt").write_text("\n".join(lines) + "\n", "latin-1")
    for part, chosen in (("train", lines[:80]), ("dev", lines[80:100]), ("test", lines[100:])):
        (folder / f"parts.{part}.txt").write_text("\n".join(chosen) + "\n", "latin-1")
    return folder


def colour_lines(count: int) -> list[str]:
    random = np.random.default_rng(1)
    lines = []
    for number in range(count):
        label = ("warm", "cold")[number % 2]
        words = [*random.choice(FILLERS, random.integers(0, 9)), random.choice(COLOURS[label])]
        lines.append(f"{label} {' '.join(random.permutation(words))}")
    return lines


@pytest.fixture(scope="module")
def trained(recipe: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with a model of each family, trained on `parts`."""
    models = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        line = ["--data", str(data), "--set", "parts", "--encoder", family, *SMALL]
        assert recipe.main([*line, "--models", str(models), "--results", str(models / "results.jsonl")]) == 0
    return models


@pytest.fixture(scope="module")
def service(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running service of these models, as a client sees it."""
    with serving(trained, tmp_path_factory.mktemp("log")) as server:
        yield importlib.import_module("training.service").Service(server.address)


@pytest.mark.parametrize("family", FAMILIES)
def test_service_answers_as_the_trained_model(family: str, trained: Path, data: Path, service: Any, text_sets: Any) -> None:
    """The labels and the probabilities of every test text match PyTorch's, with the stored weights and with the padding of a batch."""
    classifier = importlib.import_module("training.classifier")
    vocabulary = importlib.import_module("training.vocabulary")
    folder = trained / f"parts-{family}" / "1"
    model = classifier.read_back(folder, family, 6)
    test = text_sets.read_set(data, "parts").test
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder / spec.TOKENIZER))
    [batch] = vocabulary.batches(vocabulary.tokenised(test, tokenizer, model.labels), len(test))
    with torch.no_grad():
        expected = model(batch.tokens, batch.lengths).softmax(1)
    answer = service.fetch_json("/infer", {"model": f"parts-{family}", "inputs": [example.text for example in test]})
    scores = [[output["scores"][label] for label in model.labels] for output in answer["outputs"]]
    np.testing.assert_allclose(scores, expected, atol=ROUNDING)
    labels = service.classify(f"parts-{family}", test).labels
    margins = expected.sort(1).values.diff(dim=1)[:, -1]
    best = [model.labels[index] for index in expected.argmax(1)]
    assert all(label == other for label, other, margin in zip(labels, best, margins, strict=True) if margin > 2 * ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_record_and_card_have_what_was_measured(family: str, trained: Path, service: Any, text_sets: Any, data: Path) -> None:
    records = importlib.import_module("training.records").read(trained / "results.jsonl")
    [record] = [record for record in records if record["encoder"] == family]
    folder = trained / f"parts-{family}" / "1"
    card = (folder / spec.CARD).read_text()
    assert f"--set parts --encoder {family} --width 12" in card and "$" not in card
    assert f"{record['stored_percent']:.1f} % with the stored float16 weights" in card
    assert record["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert record["test_examples"] == 20 and 1 <= record["epoch"] <= 3
    curve = record["curve"]
    assert record["epoch"] <= len(curve) <= 3 and 0 < curve[-1]["seconds"] <= record["training_seconds"] + 0.1
    assert curve[record["epoch"] - 1]["development_percent"] == record["development_percent"]
    assert service.accuracy(f"parts-{family}", text_sets.read_set(data, "parts").test) == pytest.approx(
        record["stored_percent"]
    )


def test_evaluate_names_the_models_with_the_labels_of_a_set(
    service: Any, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate = importlib.import_module("evaluate")
    assert evaluate.main(["--data", str(data), "--set", "parts", "--url", service.url]) == 0
    printed = capsys.readouterr().out
    assert "correct of 20 texts" in printed and all(f"| parts-{family} 1 |" in printed for family in FAMILIES)
    assert (
        evaluate.main(["--data", str(data), "--set", "colours", "--fold", "3", "--model", "parts-gru", "--url", service.url])
        == 0
    )
    printed = capsys.readouterr().out
    assert "correct of 12 texts" in printed and printed.count("| parts-") == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_score(family: str) -> None:
    classifier = importlib.import_module("training.classifier")
    torch.manual_seed(0)
    model = classifier.Classifier(family, 20, 7, 5, ("a", "b", "c")).eval()
    lengths = torch.tensor([1, 9, 4])
    tokens = torch.randint(1, 20, (3, 9))
    with torch.no_grad():
        together = model(tokens, lengths)
        alone = torch.cat([model(tokens[row : row + 1, :length], lengths[row : row + 1]) for row, length in enumerate(lengths)])
    torch.testing.assert_close(together, alone)


def test_gru_keeps_the_biases_that_the_folder_lacks_at_zero(recipe: Any, data: Path, text_sets: Any) -> None:
    settings = replace(recipe.DEFAULTS["gru"], width=6, hidden=3, epochs=2)
    trained = recipe.train(text_sets.read_set(data, "parts"), settings, None, torch.device("cpu"))
    gru = trained.fitted.model.encoder.recurrent
    for bias in (gru.bias_hh_l0, gru.bias_hh_l0_reverse):
        assert not bias[:6].any() and bias[6:].all()


def test_training_is_reproducible(recipe: Any, data: Path, text_sets: Any) -> None:
    settings = replace(recipe.DEFAULTS["qrnn"], width=6, hidden=3, epochs=2)
    weights, repeated = (
        recipe.train(text_sets.read_set(data, "parts"), settings, None, torch.device("cpu")).fitted.model.tensors()
        for _ in range(2)
    )
    assert all(torch.equal(weights[name], repeated[name]) for name in weights)


def test_best_epoch_is_kept_and_patience_ends_the_training(
    recipe: Any, data: Path, text_sets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The development accuracies 50, 70, 60, 70 with a patience of 2 end the training after epoch 4; the model comes from epoch 2."""
    classifier = importlib.import_module("training.classifier")
    accuracies, heads = iter([50.0, 70.0, 60.0, 70.0]), []

    def accuracy(model: Any, rows: Any) -> float:
        heads.append(model.head.weight.detach().clone())
        return next(accuracies)

    fitting, vocabulary = (importlib.import_module(f"training.{name}") for name in ("fitting", "vocabulary"))
    rows = [vocabulary.TokenisedText(number % 2, torch.tensor([1 + number % 2])) for number in range(20)]
    monkeypatch.setattr(classifier.Classifier, "accuracy", accuracy)
    settings = replace(recipe.DEFAULTS["cnn"], width=4, hidden=2, epochs=9, patience=2)
    fitted = fitting.fit(rows, rows[:4], ("a", "b"), torch.full((3, 4), math.nan), settings)
    assert (fitted.epoch, fitted.development, len(heads)) == (2, 70.0, 4)
    assert [epoch.development_percent for epoch in fitted.curve] == [50.0, 70.0, 60.0, 70.0]
    assert 0 < fitted.curve[0].seconds < fitted.curve[3].seconds <= fitted.seconds
    assert torch.equal(fitted.model.head.weight, heads[1]) and not torch.equal(heads[1], heads[3])


def test_vocabulary_has_no_word_of_the_parts_that_are_held_out(recipe: Any, text_sets: Any, tmp_path: Path) -> None:
    """Every text has a different word. The vocabulary has the words of the training part without its development part."""
    words = (f"word{first}{second}" for first in string.ascii_lowercase for second in string.ascii_lowercase)
    (tmp_path / "own.txt").write_text(
        "".join(f"{number % 2} {word}\n" for number, word in zip(range(100), words, strict=False))
    )
    text_set = text_sets.read_set(tmp_path, "own", 4)
    settings = replace(recipe.DEFAULTS["cnn"], width=4, hidden=2, epochs=1, minimum_count=1)
    vocabulary = recipe.train(text_set, settings, None, torch.device("cpu")).vocabulary.tokenizer.get_vocab().keys()
    rest, _ = text_sets.hold_out(text_set.train, 0)
    assert (len(text_set.test), len(rest)) == (10, 81)
    assert vocabulary == {"[UNK]"} | {example.text for example in rest}
    without = recipe.train(text_set, replace(settings, patience=0), None, torch.device("cpu")).vocabulary.tokenizer
    assert without.get_vocab().keys() == {"[UNK]"} | {example.text for example in text_set.train}


def as_line(example: Any) -> str:
    return f"{example.label} {example.text}"


def test_folds_divide_a_set(text_sets: Any, data: Path) -> None:
    sets = [text_sets.read_set(data, "colours", fold) for fold in range(10)]
    everything = sorted(map(as_line, sets[0].train + sets[0].test))
    assert len(everything) == 120 and sets[0].labels == ("cold", "warm")
    assert sorted(as_line(example) for text_set in sets for example in text_set.test) == everything
    assert all(sorted(map(as_line, text_set.train + text_set.test)) == everything for text_set in sets)
    assert sets[3].test == text_sets.read_test(data, "colours", 3)


def test_parts_of_a_set_are_its_files(text_sets: Any, data: Path, tmp_path: Path) -> None:
    text_set = text_sets.read_set(data, "parts")
    assert [len(part) for part in (text_set.train, text_set.development, text_set.test)] == [80, 20, 20]
    assert text_sets.labels_of("other", [text_sets.Example(label, "") for label in ("10", "9", "2")]) == ("2", "9", "10")
    (tmp_path / "trec.test.txt").write_bytes(b"3 Who is Jos\xe9 ?\n\n5\n")
    assert text_sets.read_test(tmp_path, "trec") == [text_sets.Example("HUM", "Who is José ?"), text_sets.Example("NUM", "")]


def test_missing_set_is_explained(recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.main(["--data", str(tmp_path), "--set", "mr"]) == 2
    assert "mr.train.txt" in (error := capsys.readouterr().err) and "0 negative, 1 positive" in error


def test_holdout_writes_no_folder(
    recipe: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe.main(["--data", str(data), "--set", "colours", "--encoder", "cnn", *SMALL, "--holdout", "2"]) == 0
    assert re.fullmatch(r"\d+\.\d % of the 11 held-out examples of tenth 2\n", capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first_line", ["", "4 3\n"])
def test_pretrained_vectors_are_used_as_they_are(
    recipe: Any, data: Path, text_sets: Any, tmp_path: Path, first_line: str
) -> None:
    """In both text formats. With --static, training does not change them, and a rare word is in the vocabulary if it has a vector."""
    vectors = {"red": [1.0, 2.0, 3.0], "blue": [-1.0, 0.5, 0.25], "once": [4.0, 5.0, 6.0], "elsewhere": [7.0, 8.0, 9.0]}
    file = tmp_path / "vectors.txt"
    file.write_text(first_line + "".join(f"{word} {' '.join(map(str, numbers))}\n" for word, numbers in vectors.items()))
    text_set = text_sets.read_set(data, "parts")
    text_set = replace(text_set, train=[*text_set.train, text_sets.Example("warm", "once rare")])
    settings = replace(recipe.DEFAULTS["cnn"], hidden=4, epochs=2, static=True)
    trained = recipe.train(text_set, settings, file, torch.device("cpu"))
    tokenizer, weight = trained.vocabulary.tokenizer, trained.fitted.model.embedding.weight
    assert trained.settings.width == 3 and tokenizer.token_to_id("rare") is tokenizer.token_to_id("elsewhere") is None
    for word in ("red", "blue", "once"):
        assert weight[tokenizer.token_to_id(word)].tolist() == vectors[word]
    moved = recipe.train(text_set, replace(settings, static=False), file, torch.device("cpu")).fitted.model.embedding.weight
    assert moved[tokenizer.token_to_id("red")].tolist() != vectors["red"]


def test_vectors_of_two_widths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vectors.txt").write_text("red 1 2 3\nblue 1 2\n")
    with pytest.raises(ValueError, match=r"widths \[2, 3\]"):
        importlib.import_module("training.vocabulary").read_vectors(tmp_path / "vectors.txt", {"red", "blue"})


def test_empty_text_is_one_unknown_token(data: Path, text_sets: Any) -> None:
    vocabulary = importlib.import_module("training.vocabulary")
    tokenizer = vocabulary.make_tokenizer(["red red"], 1)
    [row, unseen] = vocabulary.tokenised([text_sets.Example("a", ""), text_sets.Example("b", "red")], tokenizer, ("a",))
    assert row.tokens.tolist() == [0] and unseen.label == -1 and unseen.tokens.tolist() == [1]


@pytest.mark.parametrize("family", ["lstm", "sru", "cnn"])
def test_shipped_cards_are_generated_by_the_script(recipe: Any, text_sets: Any, family: str) -> None:
    card = (ROOT / "models" / f"question-type-{family}" / "1" / spec.CARD).read_text()
    [accuracy] = re.findall(r"Accuracy: (\S+) % of the 500", card)
    text_set = text_sets.TextSet("trec", text_sets.KNOWN["trec"].labels, [], None, [], None)
    record = {"source": "--set trec", "development_percent": None, "stored_percent": float(accuracy), "trained_percent": 0.0}
    settings = replace(recipe.DEFAULTS[family], patience=0)
    template = ROOT / "examples" / "question-type.card.md"
    assert recipe.card(template, text_set, settings, record | {"test_examples": 500, "vectors": 0}) == card
    [command] = re.findall(r"python examples/train_text.py (.+)", card)
    flags = recipe.arguments(command.split())
    assert {**vars(settings)}.items() <= vars(flags).items() | {"static": False}.items() and flags.set == "trec"


def write_records(file: Path, written: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in written))


@pytest.mark.slow
def test_results_runs_everything_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two folds are trained, served and measured; a second run has nothing to do. Figures of quick trials are not in the table.

    Without the models and the speed, only the model whose speed is measured is trained again.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    results, pages, records = (importlib.import_module(name) for name in ("results", "training.pages", "training.records"))
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- results -->\nold\n<!-- end of results -->\nafter\n")
    line = [
        "--data",
        str(data),
        "--sets",
        "colours",
        "--encoders",
        "cnn",
        "--folds",
        "2",
        "--jobs",
        "1",
        "--seconds",
        "2",
        "--quick",
    ]
    line += ["--models", str(tmp_path / "models"), "--results", str(tmp_path / "results.jsonl"), "--page", str(page)]
    assert results.main(line) == 0
    measured = records.read(tmp_path / "results.jsonl")
    kinds = ["training", "training", "served", "served", "speed", "speed"]
    assert [record["kind"] for record in measured] == kinds and {record["fold"] for record in measured} == {0, 1}
    for fold in (0, 1):
        trained, served, *_ = (record for record in measured if record["fold"] == fold)
        assert served["served_percent"] == pytest.approx(trained["stored_percent"])
    assert all(record["p50_ms"] > 0 and record["texts_per_second"] > 0 for record in measured[4:])
    assert page.read_text() == f"before\n\n<!-- results -->\n{pages.EMPTY}\n<!-- end of results -->\nafter\n"
    capsys.readouterr()
    assert results.main(line) == 0
    assert records.read(tmp_path / "results.jsonl") == measured and capsys.readouterr().out == ""
    write_records(tmp_path / "results.jsonl", measured[:4])
    shutil.rmtree(tmp_path / "models")
    assert results.main(line) == 0
    again = records.read(tmp_path / "results.jsonl")
    assert [(record["kind"], record["fold"]) for record in again[4:]] == [("training", 0), ("speed", 0), ("speed", 0)]


def test_settings_of_a_file_replace_the_defaults_of_a_set_and_family(tmp_path: Path) -> None:
    results = importlib.import_module("results")
    run = results.Run("mr", "gru", 3, 1)
    plans = [
        results.Plan(tmp_path, tmp_path, tmp_path / "results.jsonl", None, settings, "cpu", False)
        for settings in ({}, {"mr": {"gru": {"rate": 0.5}}, "cr": {"gru": {"rate": 0.25}}})
    ]
    assert plans[1].settings_of(run) == replace(plans[0].settings_of(run), rate=0.5)
    plans[1].append(run, {"kind": "training"})
    assert plans[1].has(run, "training") and not plans[1].has(run, "served")
    assert not plans[0].has(run, "training"), "other settings are another run"


@pytest.mark.slow
def test_choose_prints_the_best_settings_first(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choose = importlib.import_module("choose")
    line = ["--data", str(data), "--set", "colours", "--encoder", "cnn", "--quick", "--jobs", "1", "--tenths", "2"]
    assert choose.main([*line, "--try", "rate=0.0,0.05", "--try", "epochs=4"]) == 0
    header, _, best, worst = capsys.readouterr().out.splitlines()
    assert header == "| settings | tenth 0 | tenth 1 | average |"
    assert "rate = 0.05, epochs = 4" in best and "rate = 0.0, epochs = 4" in worst
    averages = [float(row.split("|")[-2]) for row in (best, worst)]
    assert averages[0] > averages[1]


def test_choose_refuses_what_is_no_setting(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module("choose").main(["--data", str(data), "--try", "depth=1,2"])
    assert "depth is not a setting with a number" in capsys.readouterr().err


def test_table_has_means_spreads_and_devices() -> None:
    table = importlib.import_module("training.table")
    place = {"date": "2026-01-02", "processor": "P"}
    common = {"set": "mr", "encoder": "sru", "pretrained": None, "quick": False, "seed": 1, **place}
    trainings = [
        {**common, "kind": "training", "fold": fold, "trained_percent": percent, "training_seconds": 10.0, "bytes": 2000}
        for fold, percent in ((0, 1.0), (0, 80.0), (1, 82.0))
    ]
    served = [
        {**common, "kind": "served", "fold": fold, "device": device, "served_percent": percent}
        for device, percents in (("cpu", (80.0, 81.0)), ("cuda:0", (79.0, 83.0)))
        for fold, percent in enumerate(percents)
    ]
    loads = [
        {
            **common,
            "kind": "speed",
            "fold": 0,
            "device": device,
            "callers": callers,
            "p50_ms": ms,
            "texts_per_second": rate,
            **gpu,
        }
        for device, gpu, callers, ms, rate in (
            ("cpu", {}, 1, 0.5, 1000.0),
            ("cpu", {}, 64, 4.0, 9000.0),
            ("cuda:0", {"gpu": "G"}, 1, 0.25, 2000.0),
        )
    ]
    quick = {**trainings[0], "quick": True, "set": "trial"}
    lines = "\n".join(table.lines([*trainings, *served, *loads, quick]))
    assert "| mr | sru | 2 | 81.0 ± 1.4 | 10 | 2,000 | 80.5 ± 0.7 | 0.50 | 9,000 | 81.0 ± 2.8 | 0.25 | 2,000 |" in lines
    assert "| sru | CPU | 1 | 81.00 | 80.50 | -0.50 |" in lines and "| sru | GPU | 1 | 81.00 | 81.00 | +0.00 |" in lines
    assert (
        "Trained on P, from 2026-01-02 to 2026-01-02." in lines and "Served on P; P, G, from" in lines and "trial" not in lines
    )


def test_readme_has_the_table_of_the_results_file() -> None:
    table, pages, records = (importlib.import_module(f"training.{name}") for name in ("table", "pages", "records"))
    drawn = pages.drawn(ROOT / "examples" / "README.md", table.MARK)
    assert drawn == list(table.lines(records.read(ROOT / "examples" / "results.jsonl")))
