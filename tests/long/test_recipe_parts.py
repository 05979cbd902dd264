"""What the recipes are made of: sets, batches, the training loop, quality figures, the generated data, and the writer of lines."""

from __future__ import annotations

import importlib
import math
import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("examples")


def module(name: str) -> Any:
    return importlib.import_module(name)


def test_tenth_of_the_training_part_selects_the_epoch(tmp_path: Path) -> None:
    sets = module("training.text_sets")
    for part, count in (("train", 90), ("test", 10)):
        (tmp_path / f"own.{part}.txt").write_text("".join(f"{number % 3} {part} {number}\n" for number in range(count)))
    parts = sets.read(tmp_path, "own", development=True)
    assert [len(part) for part in (parts.train, parts.development, parts.test)] == [81, 9, 10]
    assert len({example.text for example in parts.train + parts.development}) == 90
    whole = sets.read(tmp_path, "own", development=False)
    assert len(whole.train) == 90 and whole.development == [] and sets.labels_of("own", parts.train) == ("0", "1", "2")


def test_texts_are_read_as_latin_1_with_the_names_of_known_labels(tmp_path: Path) -> None:
    sets = module("training.text_sets")
    (tmp_path / "trec.test.txt").write_bytes(b"3 Who is Jos\xe9 ?\n\n5\n")
    assert sets.read_part(tmp_path, "trec", "test") == [sets.Example("HUM", "Who is José ?"), sets.Example("NUM", "")]
    assert module("training.parts").in_order({"10", "9", "2"}) == ("2", "9", "10")


def test_series_have_channels_and_lengths(tmp_path: Path) -> None:
    sets = module("training.series_sets")
    assert sets.parse("1,2,3:4,5.5,6:b\n").rows.tolist() == [[1, 4], [2, 5.5], [3, 6]]
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "n_TEST.ts").write_text("# comment\n@data\n1,2:10\n1:9\n")
    assert [(each.label, len(each.rows)) for each in sets.read(tmp_path, "n", "TEST")] == [("10", 2), ("9", 1)]


def test_step_sets_are_read_as_written(tmp_path: Path) -> None:
    sets = module("training.step_sets")
    examples = {
        "tags": [sets.TaggedWords(["a", "é"], ["X", "Y"]), sets.TaggedWords(["b"], ["X"])],
        "text": ["a line", "", "é"],
        "spans": [sets.Question("who ?", 'a "b" c', 1, 2)],
    }
    for kind, part in examples.items():
        sets.write(tmp_path, "set", kind, [part, part[:1], []])
        assert sets.read(tmp_path, "set", kind) == module("training.parts").Parts(part, part[:1], [])
    (tmp_path / "set.test.tags").write_text("1 000\tNUM\n1\u00a0001\tNUM", "utf-8")
    assert sets.read_part(tmp_path, "set", "tags", "test") == [sets.TaggedWords(["1_000", "1_001"], ["NUM", "NUM"])]


def test_batches_have_every_row_once_beside_rows_of_similar_length() -> None:
    batches = module("training.batches")
    rows = [batches.Row(torch.full((1 + number % 9,), number), torch.tensor([number])) for number in range(80)]
    found = batches.shuffled_batches(rows, 5, random.Random(1))
    assert sorted(int(target) for batch in found for target in batch.targets[:, 0]) == list(range(80))
    assert max(int(batch.lengths.max() - batch.lengths.min()) for batch in found) <= 4
    [padded] = batches.batches([batches.Row(torch.ones(2), torch.ones(2)), batches.Row(torch.ones(1), torch.ones(1))], 2)
    assert padded.targets.tolist() == [[1, 1], [1, batches.NO_TARGET]]


def test_best_epoch_is_kept_and_patience_ends_the_training() -> None:
    """The scores 50, 70, 60, 70 with a patience of 2 end the training after epoch 4; the weights come from epoch 2."""
    models, encoders = module("training.model"), module("training.encoders")
    model = models.Model(models.Raw(), encoders.STEP_ENCODERS["gru"](2, 3, True), 1)
    scores, heads, rows = iter([50.0, 70.0, 60.0, 70.0]), [], torch.randn(4, 5, 2)

    def backward(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch, torch.full((4,), 5)).square().mean()
        torch.autograd.backward(loss)
        return loss.detach()

    def score() -> float:
        heads.append(model.head.weight.detach().clone())
        return next(scores)

    fitted = module("training.fitting").fit(model, 9, 0.01, lambda _: [rows], backward, score=score, patience=2)
    assert (fitted.epoch, fitted.score, len(heads)) == (2, 70.0, 4) and fitted.seconds > 0
    assert torch.equal(model.head.weight, heads[1]) and not torch.equal(heads[1], heads[3])


@pytest.mark.parametrize("family", ["sru", "qrnn", "lstm", "gru", "cnn", "tcn"])
def test_padding_changes_no_score_of_a_whole_sequence(family: str) -> None:
    models, encoders = module("training.model"), module("training.encoders")
    for inputs, encoder in (
        (models.Embedding(20, 7), encoders.ENCODERS[family](7, 5)),
        (models.Scaled(torch.randn(50, 7)), encoders.STEP_ENCODERS[family](7, 5, False)),
    ):
        model = models.Model(inputs, encoder, 3, pooled=True).eval()
        is_ids = isinstance(inputs, models.Embedding)
        rows = [torch.randint(20, (length,)) if is_ids else torch.randn(length, 7) for length in (1, 9, 4)]
        for together, alone in zip(model.scores(rows), (model.scores([row])[0] for row in rows), strict=True):
            torch.testing.assert_close(together, alone)


def test_adversarial_step_adds_the_gradients_of_embeddings_with_a_higher_loss() -> None:
    recipe, models, batches = module("train_text"), module("training.model"), module("training.batches")
    model = models.Model(models.Embedding(9, 4), module("training.encoders").ENCODERS["lstm"](4, 3), 2, pooled=True)
    [batch] = batches.batches([batches.Row(torch.tensor([1, 2]), torch.tensor([1]))], 1)
    table = model.inputs.table.weight

    def step(push: float) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        loss = recipe.adversarial(model, batch, recipe.Settings("lstm", push=push))
        return float(loss), table.grad.clone()

    before = table.detach().clone()
    loss, gradient = step(0.0)
    _, both = step(0.1)
    torch.testing.assert_close(table.detach(), before)
    table.data.add_(gradient / gradient.norm(), alpha=0.1)
    higher, moved = step(0.0)
    assert higher > loss
    torch.testing.assert_close(both, gradient + moved)


def test_figures_of_quality() -> None:
    sets, tags, spans = module("training.step_sets"), module("train_tags"), module("train_spans")
    tagged = [sets.TaggedWords(list("abcd"), ["X", "X", "Y", "Y"])]
    assert tags.TagsRecipe().quality(tagged, [["X", "Y", "Y", "Y"]]) == pytest.approx(
        {"accuracy_percent": 75.0, "f1_percent": 100 * (2 / 3 + 4 / 5) / 2}
    )
    language = module("train_language").LanguageRecipe()
    assert language.quality(["a"], [[math.log(0.5), math.log(0.125)]]) == pytest.approx({"perplexity": 4.0})
    questions = [sets.Question("", "", 2, 3), sets.Question("", "", 5, 5)]
    assert spans.SpansRecipe().quality(questions, [(2, 3), (4, 6)]) == pytest.approx(
        {"exact_percent": 50.0, "f1_percent": 75.0}
    )
    streams = np.arange(24.0).reshape(1, 12, 2)
    error = module("train_forecast").ExpectedRecipe().quality(list(streams), list(streams[:, 1:] + 0.5))
    assert error == pytest.approx({"error": 0.5, "error_of_the_last_reading": 2.0})


def test_facts_have_one_answer() -> None:
    """The span is the text that the grammar inserted, and only the sentence of the question has the named words."""
    facts, generator = module("training.facts"), random.Random(0)
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
    tagged = facts.passage(generator).tagged
    assert {label for word, label in zip(tagged.words, tagged.labels, strict=True) if word in facts.PEOPLE} == {"person"}


def test_verses_become_words_with_points(tmp_path: Path) -> None:
    lines = "".join(f"Ge1:{number} And God said, Let there be (light): is it? yes!\n" for number in range(1, 1203))
    (tmp_path / "kjv.txt").write_text(lines)
    assert module("make_sets").main([str(tmp_path), "--quick", "--kjv", str(tmp_path / "kjv.txt")]) == 0
    parts = module("training.step_sets").read(tmp_path, "kjv", "tags")
    assert [len(part) for part in (parts.train, parts.development, parts.test)] == [202, 500, 500]
    assert parts.test[0].words == ["and", "god", "said", "let", "there", "be", "light", "is", "it", "yes"]
    assert parts.test[0].labels == [*["none"] * 2, "comma", *["none"] * 3, "colon", "none", "question", "exclamation"]


class Chain:
    """A service with a language model of three bytes, in which the probabilities of a byte depend on the previous byte."""

    chances: ClassVar[dict[int, dict[int, float]]] = {
        10: {97: 0.5, 98: 0.4, 10: 0.1},
        97: {97: 0.05, 98: 0.85, 10: 0.1},
        98: {97: 0.3, 98: 0.1, 10: 0.6},
    }

    def __init__(self) -> None:
        self.sessions: set[str] = set()

    def fetch_json(self, path: str, body: Any = None, method: str | None = None) -> Any:
        if method == "DELETE":
            return self.sessions.remove(path.split("/")[2])
        self.sessions.add(body["session"])
        chances = self.chances[body["inputs"][0][-1]]
        return {"outputs": [{"ids": list(chances), "scores": list(chances.values())}]}


def test_samples_follow_the_seed_and_begin_with_the_text() -> None:
    """The writer closes its sessions."""
    generate, chain = importlib.import_module("generate"), Chain()
    one, again, other = (
        [generate.sample(chain, "chain", "ab", 7, 1.0, source) for _ in range(5)] for source in map(random.Random, (1, 1, 2))
    )
    assert one == again != other and all(line.startswith(b"ab") for line in one) and chain.sessions == set()
    assert max(len(generate.sample(chain, "chain", "", 3, 1.0, random.Random(seed))) for seed in range(20)) == 3
    assert generate.main(["--model", "chain", "--url", "http://127.0.0.1:9"]) == 1
