"""The dictionary of words gives exactly the library's ids, or is not used."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from service.modeling.word_table import WordTable, build_word_table

MODELS = Path(__file__).resolve().parents[2] / "models"
LIBRARY = Tokenizer.from_file(str(MODELS / "question-type-cnn/1/tokenizer.json"))
DEFINITION: dict[str, Any] = json.loads(LIBRARY.to_str())


def table_of(**changes: Any) -> WordTable | None:
    definition = json.dumps({**DEFINITION, **changes})
    library = Tokenizer.from_str(definition)
    return build_word_table(json.loads(definition), lambda text: list(library.encode(text).ids))


@pytest.fixture(scope="module")
def table() -> WordTable:
    table = table_of()
    assert table is not None
    return table


@settings(max_examples=150)
@given(text=st.one_of(st.text(), st.text(st.characters(max_codepoint=127)), st.text("aB1[]?! UNK\t\x1c\x85", max_size=40)))
def test_ids_are_those_of_the_library(table: WordTable, text: str) -> None:
    if table.covers(text):
        assert array("i", table.packed_ids(text)).tolist() == LIBRARY.encode(text).ids


@pytest.mark.parametrize("text", ["how far", "HOW far is it, in 1999?", "", "   ", "a-b_c'd", "x" * 10_000])
def test_printable_ascii_is_covered(table: WordTable, text: str) -> None:
    assert table.covers(text)


@pytest.mark.parametrize("text", ["é", "日本", "a\tb", "a\nb", "a\0", "\x1c", "[UNK]", "far [UNK] away", "\ud800"])
def test_other_texts_belong_to_the_library(table: WordTable, text: str) -> None:
    assert not table.covers(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "NFD"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, {"type": "StripAccents"}]}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": "0"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "[0-9]"}, "content": "00"}},
        {"added_tokens": [{**DEFINITION["added_tokens"][0], "normalized": True}]},
        {"post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    ],
)
def test_other_tokenizers_have_no_table(changes: dict[str, Any]) -> None:
    assert table_of(**changes) is None


@pytest.mark.parametrize("normalizer", [None, {"type": "Lowercase"}, DEFINITION["normalizer"]])
def test_normaliser_that_the_table_applies(normalizer: dict[str, Any] | None) -> None:
    library = Tokenizer.from_str(json.dumps({**DEFINITION, "normalizer": normalizer}))
    table = table_of(normalizer=normalizer)
    assert table is not None
    assert array("i", table.packed_ids("How FAR, 12?")).tolist() == library.encode("How FAR, 12?").ids


def test_table_that_disagrees_with_the_library_is_not_used() -> None:
    assert build_word_table(DEFINITION, lambda _: [7]) is None
