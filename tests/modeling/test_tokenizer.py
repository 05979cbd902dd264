"""Tokenisation, and tokenizer files that are rejected."""

from __future__ import annotations

import base64
import hashlib
import json
import resource
import subprocess
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel, WordPiece
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from service.errors import InvalidInput, ModelError
from service.modeling.spec import ModelSpec
from service.modeling.tokenizer import Tokenizer
from tests import models


def ids(tokenizer: Tokenizer, text: str, field: str = "inputs[0]") -> list[int]:
    return array("i", tokenizer.packed_ids(text, field)).tolist()


def with_file(folder: Path, model: ModelSpec, content: str) -> ModelSpec:
    """Replace the tokenizer of the folder and return the updated spec."""
    (folder / "tokenizer.json").write_text(content)
    signed = {**model.sha256, "tokenizer.json": hashlib.sha256(content.encode()).hexdigest()}
    return model.model_copy(update={"sha256": signed})


def word_level(vocabulary: dict[str, int], unknown: str | None = "[UNK]") -> Library:
    made = Library(WordLevel(vocabulary, unk_token=unknown) if unknown else WordLevel(vocabulary))
    made.pre_tokenizer = Whitespace()
    return made


def numbered(size: int) -> dict[str, int]:
    return {"[UNK]": 0, **{f"word{id}": id for id in range(1, size)}}


def test_unknown_words_become_the_unknown_id(folder: Path, model: ModelSpec) -> None:
    tokenizer = Tokenizer.read(folder, model)
    assert ids(tokenizer, "how far is the moon ?") == [1, 2, 3, 4, 0, 9]


@pytest.mark.parametrize("text", ["", "\n\t", "\0", "🙂" * 99, "\u202e", "é\u0301", "\ufffd", "a" * 10_000])
def test_unusual_text_becomes_known_ids(folder: Path, model: ModelSpec, text: str) -> None:
    found = ids(Tokenizer.read(folder, model), text)
    assert set(found) <= set(range(len(models.WORDS))) and bool(found) == bool(text.strip())


def test_invalid_unicode_error_names_the_field(folder: Path, model: ModelSpec) -> None:
    with pytest.raises(InvalidInput, match=r"inputs\[3\] cannot be tokenised") as caught:
        ids(Tokenizer.read(folder, model), "how \ud800 far", "inputs[3]")
    assert caught.value.field == "inputs[3]"


def test_unknown_word_without_unknown_token_is_rejected(folder: Path, model: ModelSpec) -> None:
    known = {f"word{id}": id for id in range(len(models.WORDS))}
    tokenizer = Tokenizer.read(folder, with_file(folder, model, word_level(known, unknown=None).to_str()))
    assert ids(tokenizer, "word3 word1") == [3, 1]
    with pytest.raises(InvalidInput, match=r"inputs\[0\] cannot be tokenised"):
        ids(tokenizer, "word3 moon")


def test_padding_and_truncation_of_the_file_are_ignored(folder: Path, model: ModelSpec) -> None:
    made = word_level(numbered(len(models.WORDS)))
    made.enable_padding(length=8)
    made.enable_truncation(max_length=2)
    tokenizer = Tokenizer.read(folder, with_file(folder, model, made.to_str()))
    assert ids(tokenizer, "word1 word2 word3") == [1, 2, 3]
    padded = with_file(folder, model, word_level(numbered(7)).to_str())  # embeddings are often padded to a multiple of 8 rows
    assert ids(Tokenizer.read(folder, padded), "word1 word6") == [1, 6]


def test_vocabulary_size_error_has_both_sizes(folder: Path, model: ModelSpec) -> None:
    other = with_file(folder, model, word_level(numbered(12)).to_str())
    with pytest.raises(ModelError) as caught:
        Tokenizer.read(folder, other)
    assert str(caught.value) == (
        f"{folder / 'tokenizer.json'} has ids up to 11 and input.vocabulary in model.toml is 10: raise it to 12, "
        "with as many rows in the embedding, or use the tokenizer of the model"
    )


@pytest.mark.parametrize("content", ["", "[]", json.dumps({"version": "1.0", "model": {"type": "Abacus"}})])
def test_broken_file_error_names_the_file(folder: Path, model: ModelSpec, content: str) -> None:
    broken = with_file(folder, model, content)
    with pytest.raises(ModelError) as caught:
        Tokenizer.read(folder, broken)
    assert str(caught.value).startswith(f"{folder / 'tokenizer.json'}: ")


def test_file_without_its_digest_is_rejected(folder: Path, model: ModelSpec) -> None:
    with pytest.raises(ModelError, match=r"sha256 has no entry for tokenizer.json: add the digest that sha256sum prints"):
        Tokenizer.read(folder, model.model_copy(update={"sha256": {}}))
    with_file(folder, model, word_level(numbered(len(models.WORDS))).to_str())
    with pytest.raises(ModelError, match=r"tokenizer.json does not have the digest in model.toml"):
        Tokenizer.read(folder, model)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.read(folder, model)


@pytest.mark.parametrize(
    "part, content",
    [
        ("model", WordPiece({"[UNK]": 0}, unk_token="[UNK]", max_input_chars_per_word=100_000)),
        ("normalizer", Sequence([Replace("a", "a" * 100)] * 3)),
        ("normalizer", Sequence([Replace(Regex("[0-9]*"), "x")] * 11)),
        ("normalizer", Prepend("a" * 2000)),
        ("post_processor", TemplateProcessing("$A " * 2000 + "[CLS]", None, [("[CLS]", 0)])),
        ("model", WordPiece({"[UNK]": 0}, unk_token="[UNK]", continuing_subword_prefix="#" * 2000)),
    ],
)
def test_tokenizer_of_high_cost_is_refused(part: str, content: Any, folder: Path, model: ModelSpec) -> None:
    made = word_level(numbered(len(models.WORDS)))
    setattr(made, part, content)
    with pytest.raises(ModelError, match=r"it may make a text \d+ times as long|max_input_chars_per_word is 100000"):
        Tokenizer.read(folder, with_file(folder, model, made.to_str()))


@pytest.mark.parametrize(
    "table, reason",
    [
        (b"", "Cannot parse"),  # the library panics at these two
        (b"\4\0\0\0abcd", "index out of bounds"),
        (b"\4\0\0\0\0\0\0\0" + b"a" * 2000 + b"\0", "2000 times"),
    ],
)
def test_damaged_table_of_characters_is_an_error(table: bytes, reason: str, folder: Path, model: ModelSpec) -> None:
    made = json.loads(word_level(numbered(len(models.WORDS))).to_str())
    made["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    with pytest.raises(ModelError, match=reason):
        Tokenizer.read(folder, with_file(folder, model, json.dumps(made)))


SLOW = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
"""Normalising all of the tokens below would take it minutes."""


@pytest.mark.parametrize(
    "changes",
    [{"normalizer": SLOW, "added_tokens": [f"{'a' * 21}b{id}" for id in range(1000)]}, {"normalizer": [[]] * 1_000_000}],
)
def test_reading_ends_at_a_limit(
    changes: dict[str, Any], folder: Path, model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child process reads the file first. Its limits are lower here: a second, and 48 MiB."""
    made = json.loads(word_level(numbered(len(models.WORDS))).to_str()) | changes
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
    made["added_tokens"] = [{"id": 10 + id, "content": text, **flags} for id, text in enumerate(made["added_tokens"])]

    def lower_limits() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
        resource.setrlimit(resource.RLIMIT_DATA, (48 << 20, 48 << 20))

    monkeypatch.setattr(subprocess, "run", partial(subprocess.run, preexec_fn=lower_limits))
    with pytest.raises(ModelError, match=r"tokenizer.json: (it crashes, or takes 10 s|MemoryError)"):
        Tokenizer.read(folder, with_file(folder, model, json.dumps(made)))
