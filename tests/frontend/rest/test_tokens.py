"""POST /tokens names the steps of a text, and the texts of ids."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from service.frontend.rest.tokens import _tokens
from service.modeling.tokenizer import Tokenizer
from tests.frontend.in_process import InProcess
from tests.models import WORDS


def test_text_is_split_into_the_steps_that_the_model_sees(local: InProcess) -> None:
    text = "how  far,\tis 𝒳 it?"
    body = {"model": "words", "inputs": [text, "", [1, 2, 9, 500]], "version": 1}
    answer = local.client.post("/tokens", json=body).json()
    assert (answer["model"], answer["version"]) == ("words", "1")
    first, empty, ids = answer["outputs"]
    assert first["tokens"] == ["how", "far", ",", "is", "𝒳", "it", "?"]
    assert first["tokens"] == [text[begin:end] for begin, end in first["offsets"]]
    assert first["ids"] == [WORDS.index(token) if token in WORDS else 0 for token in first["tokens"]]
    assert empty == {"ids": [], "tokens": [], "offsets": []}
    assert ids == {"ids": [1, 2, 9, 500], "tokens": ["how", "far", "?", ""]}


def test_tokens_that_the_tokenizer_adds_cover_nothing() -> None:
    library = Library(WordLevel({"[CLS]": 0, "sea": 1, "[UNK]": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = Whitespace()
    library.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 0)])
    named = _tokens(Tokenizer(library.to_str().encode()), "sea", "inputs[0]")
    assert named == {"ids": [0, 1], "tokens": ["[CLS]", "sea"], "offsets": [(0, 0), (0, 3)]}


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        *(({"inputs": inputs}, 400, "inputs") for inputs in ([], [[-1]], [[1 << 31]], [[1.5]], [None])),
        *(({"inputs": ["a"], name: value}, 400, name) for name, value in (("other", 1), ("model", "sensors"))),
        *(({"inputs": ["a"], name: 9}, 404, name) for name in ("version",)),
        ({"inputs": ["a"] * 65}, 413, "inputs"),
        ({"inputs": ["a" * (1 << 17)]}, 413, ""),
        ({"inputs": ["a"], "model": "unknown"}, 404, "model"),
    ],
)
def test_wrong_request_names_its_field(body: dict[str, Any], status: int, field: str, local: InProcess) -> None:
    answer = local.client.post("/tokens", json={"model": "words", **body})
    assert (answer.status_code, (answer.json().get("field") or "").split("[")[0]) == (status, field), answer.text
