"""Text to token ids with the `tokenizer.json` of a model folder (Hugging Face tokenizers)."""

from __future__ import annotations

import base64
import json
import math
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HuggingFaceTokenizer

from service.errors import InvalidInput, ModelError
from service.modeling.spec import MODEL, TOKENIZER, ModelSpec, read_verified
from service.modeling.word_table import build_word_table

MAX_GROWTH = 1024
"""How many times as long its tokenizer may make a text: a short text must not take seconds, and all memory."""
MAX_WORD_CHARACTERS = 256
"""Characters of a word that WordPiece takes apart. Its time grows with their cube, and 100 are usual."""


class Tokenizer:
    """The tokenizer of one model."""

    def __init__(self, definition: bytes) -> None:
        """definition: the content of tokenizer.json, which a decoder process gets. The library's exceptions pass through."""
        self.definition = definition
        _check_cost(json.loads(definition))  # before the library normalises the tokens in the file
        self._tokenizer = tokenizer = HuggingFaceTokenizer.from_buffer(definition)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._word_table = build_word_table(json.loads(tokenizer.to_str()), lambda text: list(tokenizer.encode(text).ids))
        with suppress(Exception):  # a panic passes through
            tokenizer.encode_batch_fast(["a"])  # the library's first batch takes a millisecond: no request should wait for it

    @classmethod
    def read(cls, folder: Path, spec: ModelSpec) -> Tokenizer:
        """Read the tokenizer of a version folder; raises ModelError if the file or its vocabulary does not match `spec`."""
        file = folder / TOKENIZER
        try:
            tokenizer = cls(read_verified(file, spec))
        except ModelError:
            raise
        except BaseException as error:  # the library raises plain Exception for every kind of broken file, and panics at some
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ModelError(f"{file}: {error}") from error
        tokens = tokenizer.vocabulary
        if tokens > (spec.input.vocabulary or 0):
            raise ModelError(
                f"{file} has ids up to {tokens - 1} and input.vocabulary in {MODEL} is {spec.input.vocabulary}: raise it to {tokens}, "
                "with as many rows in the embedding, or use the tokenizer of the model"
            )
        return tokenizer

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary that covers all ids."""
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def packed_ids(self, text: str, field: str) -> bytes:
        """Return the token ids of a text as little-endian int32; raises InvalidInput if it cannot be tokenised.

        field: the request field that has the text.
        """
        table = self._word_table
        if table is not None and table.covers(text):
            return table.packed_ids(text)
        ids = self._encode(text, field)
        return struct.pack(f"<{len(ids)}i", *ids)

    def tokens(self, text: str, field: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the id of each token of a text, and the characters that it covers, from a first to before a last; raises InvalidInput.

        A token that the tokenizer adds, such as [CLS], covers no characters.
        """
        try:
            encoding = self._tokenizer.encode(text)
        except BaseException as error:
            raise _refusal(error, field) from error
        return encoding.ids, encoding.offsets

    def _encode(self, text: str, field: str) -> list[int]:
        try:
            # A batch of one costs less than `encode`: it computes no offsets. Larger batches gain less than collecting them costs.
            ids: list[int] = self._tokenizer.encode_batch_fast([text])[0].ids
        except BaseException as error:  # a panic in the library is not an Exception
            raise _refusal(error, field) from error
        return ids

    def text_of(self, id: int) -> str:
        """Return a token of the vocabulary as text, empty for an id that has none."""
        piece: str | None = self._tokenizer.id_to_token(id)
        return "" if piece is None else self._tokenizer.decode([id], skip_special_tokens=False) or piece


def _refusal(error: BaseException, field: str) -> BaseException:
    """Return the InvalidInput for an exception of the library, or the exception itself if it ends the process."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    return InvalidInput(f"{field} cannot be tokenised: {error}", field=field)


def _check_cost(definition: dict[str, Any]) -> None:
    """Raise ValueError if time or memory of a tokenizer may be out of proportion to a text. definition: the content of its file."""
    growth = math.prod(_growth(definition.get(part)) for part in ("normalizer", "model", "post_processor", "decoder"))
    if growth > MAX_GROWTH:
        raise ValueError(f"it may make a text {growth} times as long, {MAX_GROWTH} times is allowed: replace fewer characters")
    characters = definition.get("model", {}).get("max_input_chars_per_word", 0)
    if characters > MAX_WORD_CHARACTERS:
        raise ValueError(f"max_input_chars_per_word is {characters}: lower it to {MAX_WORD_CHARACTERS}")


def _growth(step: Any) -> int:
    """Return how many times as long a text may become in a step of a tokenizer, as far as its file decides that."""
    growth = 1
    for key, value in (step or {}).items():
        match key:
            case "normalizers" | "processors" | "decoders":
                growth *= math.prod(map(_growth, value))
            case "content" | "prepend" | "continuing_subword_prefix" | "end_of_word_suffix":
                text = step.get("pattern", {}).get("String", "")
                # A regular expression may match between any two characters.
                growth *= max(1, math.ceil(len(value) / len(text))) if text else 1 + len(value or "")
            case "precompiled_charsmap":  # the size of a trie, the trie, and texts that end with a zero byte
                table = base64.b64decode(value)
                texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
                growth *= max(1, *(len(text.decode(errors="ignore")) for text in texts))
            case "single":
                ids = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
                growth *= sum(ids[piece["SpecialToken"]["id"]] if "SpecialToken" in piece else 1 for piece in value)
    return growth
