"""POST /tokens names the steps of a text, and the texts of ids."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from service.frontend.rest.tokens import _tokens
from service.modeling.tokenizer import Tokenizer
from tests.frontend.in_process import InProcess
from tests.models import WORDS


def tokens(local: InProcess, *inputs: Any, **options: Any) -> httpx.Response:
    return local.client.post("/tokens", json={"model": "words", "inputs": list(inputs), **options})


def test_text_is_split_into_the_steps_that_the_model_sees(local: InProcess) -> None:
    text = "how  far,\tis 𝒳 it?"
    answer = tokens(local, text, "", version=1).json()
    assert (answer["model"], answer["version"]) == ("words", "1")
    first, empty = answer["outputs"]
    assert first["tokens"] == ["how", "far", ",", "is", "𝒳", "it", "?"]
    assert first["tokens"] == [text[begin:end] for begin, end in first["offsets"]]
    assert first["ids"] == [WORDS.index(token) if token in WORDS else 0 for token in first["tokens"]]
    assert empty == {"ids": [], "tokens": [], "offsets": []}


def test_ids_have_texts(local: InProcess) -> None:
    [output] = tokens(local, [1, 2, 9, 500]).json()["outputs"]
    assert output == {"ids": [1, 2, 9, 500], "tokens": ["how", "far", "?", ""]}


def test_tokens_that_the_tokenizer_adds_cover_nothing() -> None:
    library = Library(WordLevel({"[CLS]": 0, "sea": 1, "[UNK]": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = Whitespace()
    library.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 0)])
    named = _tokens(Tokenizer(library.to_str().encode()), "sea", "inputs[0]")
    assert named == {"ids": [0, 1], "tokens": ["[CLS]", "sea"], "offsets": [(0, 0), (0, 3)]}


@pytest.mark.parametrize(
    ("body", "status", "code", "field"),
    [
        ({"model": "words"}, 400, "invalid_input", "inputs"),
        ({"model": "words", "inputs": []}, 400, "invalid_input", "inputs"),
        ({"model": "words", "inputs": [[-1]]}, 400, "invalid_input", "inputs[0]"),
        ({"model": "words", "inputs": [[1 << 31]]}, 400, "invalid_input", "inputs[0]"),
        ({"model": "words", "inputs": [[1.5]]}, 400, "invalid_input", "inputs[0]"),
        ({"model": "words", "inputs": [None]}, 400, "invalid_input", "inputs[0]"),
        ({"model": "words", "inputs": ["a"], "other": 1}, 400, "invalid_input", "other"),
        ({"model": "words", "inputs": ["a"] * 65}, 413, "too_large", "inputs"),
        ({"model": "words", "inputs": ["a" * (1 << 17)]}, 413, "too_large", None),
        ({"model": "sensors", "inputs": ["a"]}, 400, "invalid_input", "model"),
        ({"model": "unknown", "inputs": ["a"]}, 404, "unknown_model", "model"),
        ({"model": "words", "inputs": ["a"], "version": 9}, 404, "unknown_model", "version"),
    ],
)
def test_wrong_request_names_its_field(
    body: dict[str, Any], status: int, code: str, field: str | None, local: InProcess
) -> None:
    answer = local.client.post("/tokens", json=body)
    error = answer.json()
    assert (answer.status_code, error["code"]) == (status, code), error
    assert (error.get("field") or "").split("[")[0] == (field or "").split("[")[0], error
