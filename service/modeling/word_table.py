"""Token ids of ASCII texts from a dictionary of words, for the one kind of tokenizer where a dictionary gives exactly the library's ids.

The kind is a WordLevel model behind BertPreTokenizer, which splits at white space and at every punctuation character, with lower-casing and
replaced digits as the only normalisation. Any other tokenizer, and any text that is not plain ASCII, belongs to the library.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

# The rule of the library's BertPreTokenizer for printable ASCII: spaces separate words; a punctuation character is a word.
_WORD = re.compile(rb"[^ !-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")
_DIGITS = ("[0-9]", "\\d")
_CHECKED_TEXTS = 400


class WordTable:
    """Maps the words of an ASCII text to their packed ids.

    `covers` tells whether a text may be looked up; all other texts belong to the library.
    """

    def __init__(self, ids: dict[str, int], unknown: int, folding: bytes, added: Iterable[str]) -> None:
        """ids: the vocabulary. folding: the normalised form of each byte. added: tokens that the library finds before it normalises."""
        self._ids = {word.encode(): struct.pack("<i", id) for word, id in ids.items()}
        self._unknown = struct.pack("<i", unknown)
        self._folding = folding
        self._added = re.compile("|".join(re.escape(token) for token in added) or "(?!)")

    def covers(self, text: str) -> bool:
        """Return whether `packed_ids` gives the library's ids for a text: printable ASCII without added tokens."""
        return text.isascii() and text.isprintable() and self._added.search(text) is None

    def packed_ids(self, text: str) -> bytes:
        """Return the ids of a text as little-endian int32."""
        words = _WORD.findall(text.encode().translate(self._folding))
        return b"".join(map(self._ids.get, words, repeat(self._unknown)))


def build_word_table(parsed: dict[str, Any], encode: Callable[[str], list[int]]) -> WordTable | None:
    """Return a table for a tokenizer, or None where a dictionary does not give the library's ids.

    parsed: the content of tokenizer.json. encode: the library's tokenizer, whose ids are compared with the table's on generated texts.
    """
    model, folding = parsed["model"], _folding(parsed["normalizer"])
    if folding is None or parsed["pre_tokenizer"] != {"type": "BertPreTokenizer"} or parsed["post_processor"] is not None:
        return None
    if model["type"] != "WordLevel" or model["unk_token"] not in model["vocab"]:
        return None
    if any(token["normalized"] for token in parsed["added_tokens"]):
        return None  # the library finds these in the normalised text
    added = [token["content"] for token in parsed["added_tokens"]]
    table = WordTable(model["vocab"], model["vocab"][model["unk_token"]], folding, added)
    return table if all(_agrees(table, encode, text) for text in _sample_texts(list(model["vocab"]))) else None


def _agrees(table: WordTable, encode: Callable[[str], list[int]], text: str) -> bool:
    ids = encode(text)
    return not table.covers(text) or table.packed_ids(text) == struct.pack(f"<{len(ids)}i", *ids)


def _folding(normalizer: dict[str, Any] | None) -> bytes | None:
    """Return the normalised form of each byte, or None for a normaliser that does more than lower-case and replace digits."""
    folding = bytearray(range(256))
    for step in _steps(normalizer):
        match step:
            case {"type": "Lowercase"}:
                folding = bytearray(bytes(folding).lower())
            case {"type": "Replace", "pattern": {"Regex": pattern}, "content": content} if (
                pattern in _DIGITS and len(content) == 1 and content.isascii() and content.isalnum()
            ):
                folding[ord("0") : ord("9") + 1] = content.encode() * 10
            case _:
                return None
    return bytes(folding)


def _steps(normalizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if normalizer is None:
        return []
    return list(normalizer["normalizers"]) if normalizer["type"] == "Sequence" else [normalizer]


def _sample_texts(words: list[str]) -> list[str]:
    """Return texts of random words, random ASCII characters, and every ASCII character between two words."""
    generator = random.Random(0)
    texts = [f"a{chr(code)}b {chr(code)} c" for code in range(128)]
    for _ in range(_CHECKED_TEXTS):
        texts.append(" ".join(generator.choices(words, k=8)))
        texts.append("".join(chr(generator.randrange(32, 127)) for _ in range(40)))
    return texts
