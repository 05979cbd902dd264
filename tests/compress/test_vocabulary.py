"""Smaller vocabularies: `seqserve compress --vocabulary`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from service import local
from service.compress import Changes, compress
from service.errors import ModelError
from service.modeling import spec, store
from service.modeling.spec import TOKENIZER
from service.settings import load
from tests import models


def settings(root: Path) -> Any:
    return load({"models": root}, {})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    models.words(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("how far is the sea\n\nhow far is the first ?\nhow was the\n")
    return file


def pruned(root: Path, words: int, texts: Path, **options: Any) -> tuple[Path, str]:
    return compress(settings(root), "words", Changes(vocabulary=words, texts=texts), **options)


def vocabulary(folder: Path) -> dict[str, int]:
    words: dict[str, int] = json.loads((folder / TOKENIZER).read_text())["model"]["vocab"]
    return words


def test_most_frequent_words_and_special_tokens_stay(root: Path, texts: Path) -> None:
    folder, section = pruned(root, 3, texts)
    before, after = vocabulary(folder.parent / "1"), vocabulary(folder)
    unknown = json.loads((folder / TOKENIZER).read_text())["model"]["unk_token"]
    assert set(after) == {unknown, "how", "the", *sorted({"far", "is"}, key=before.__getitem__)[:1]}
    assert sorted(after.values()) == list(range(4)) and sorted(after, key=after.__getitem__) == sorted(
        after, key=before.__getitem__
    )
    given, kept = (store.read_arrays(one, spec.read(one))["layers.0.weight"] for one in (folder.parent / "1", folder))
    assert all(torch.equal(kept[number], given[before[word]]) for word, number in after.items())
    assert f"with 4 of {len(before)} tokens." in section and "the first 3 texts of texts.txt" in section


def test_answers_for_kept_words_do_not_change(root: Path, texts: Path) -> None:
    folder, section = pruned(root, 7, texts, name="small")
    asked = ["how far is the sea", "the first", "what is the sea"]
    before, after = (local.infer(settings(root), name, asked) for name in ("words", "small"))
    assert before[:2] == after[:2]
    assert before[2] == after[2] or "what" not in vocabulary(folder)
    assert "The best answer is the same for 100.0 % of them." in section


def test_words_that_went_are_unknown(root: Path, texts: Path) -> None:
    pruned(root, 1, texts, name="small")
    unknown, other = local.infer(settings(root), "small", ["zzz the", "sea the"])
    assert unknown["scores"] == other["scores"]


def test_labelled_texts_are_tokenised_for_each_version(root: Path, texts: Path, tmp_path: Path) -> None:
    data = tmp_path / "labelled.txt"
    data.write_text("near how far is the sea\nfar the first\n")
    _, section = pruned(root, 7, texts, data=data)
    assert "answered 2 texts of labelled.txt" in section and "| accuracy |" in section
    assert "The outputs differ by 0 at most" in section


@pytest.mark.parametrize(
    "changes, message",
    [
        (Changes(vocabulary=3), "--vocabulary and --texts belong together"),
        (Changes(texts=Path("texts.txt"), rank=2), "--vocabulary and --texts belong together"),
        (Changes(), "nothing would change: give --precision, --rank or --vocabulary"),
        (Changes(vocabulary=3, texts=Path("nowhere.txt")), "nowhere.txt cannot be read"),
    ],
)
def test_impossible_changes_are_refused(root: Path, changes: Changes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        compress(settings(root), "words", changes)
    assert [path.name for path in (root / "words").iterdir()] == ["1"]


def test_vocabulary_that_reduces_nothing_is_refused(root: Path, texts: Path) -> None:
    texts.write_text(" ".join(models.WORDS))
    with pytest.raises(ModelError, match=r"--vocabulary is 500 and words has \d+ tokens: choose a lower number"):
        pruned(root, 500, texts)


def test_tokens_that_are_no_words_are_refused(root: Path, texts: Path) -> None:
    definition = json.loads((root / "words" / "1" / TOKENIZER).read_text())
    definition["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    model = spec.read(root / "words" / "1")
    arrays = store.read_arrays(root / "words" / "1", model)
    store.write(root / "words" / "2", model, arrays, card="", tokenizer=json.dumps(definition))
    with pytest.raises(ModelError, match="needs a tokenizer of whole words"):
        pruned(root, 3, texts)


def test_model_without_a_tokenizer_is_refused(tmp_path: Path, texts: Path) -> None:
    models.sensors(tmp_path / "models")
    with pytest.raises(ModelError, match="--vocabulary needs a model for texts, and sensors takes features"):
        compress(settings(tmp_path / "models"), "sensors", Changes(vocabulary=3, texts=texts))
