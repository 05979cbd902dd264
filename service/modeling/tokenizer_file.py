"""Parses the content of a tokenizer.json within limits of time and memory: `python -m service.modeling.tokenizer_file` is the child
process that parses it first. It imports the library of tokenizers and little else, so that it costs a start next to nothing."""

from __future__ import annotations

import base64
import json
import math
import resource
import subprocess
import sys
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer

MAX_GROWTH = 1024
"""How many times as long its tokenizer may make a text: a short text must not take seconds, and all memory."""
MAX_WORD_CHARACTERS = 256
"""Characters of a word that WordPiece takes apart. Its time grows with their cube, and 100 are usual."""
CHILD_SECONDS, CHILD_BYTES = 10, 2 << 30
"""Processor time and memory of the child process. 262,144 words take a second and 230 MiB, and a file of 64 MiB 3 s and 330 MiB."""


def parse(definition: bytes) -> Tokenizer:
    """Return the tokenizer with this content. The library's exceptions pass through."""
    _check_cost(json.loads(definition))  # before the library normalises the tokens in the file
    tokenizer = Tokenizer.from_buffer(definition)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    with suppress(Exception):  # a panic passes through
        tokenizer.encode_batch_fast(["a"])  # the library's first batch takes a millisecond: no request should wait for it
    return tokenizer


def check_within_limits(definition: bytes) -> None:
    """Raise ValueError unless a child process parses this content within its limits."""
    child = subprocess.run([sys.executable, "-m", __name__], input=definition, capture_output=True)
    if child.returncode:
        reason = child.stderr.decode(errors="replace").strip().rpartition("\n")[2][:500] if child.returncode > 0 else ""
        raise ValueError(reason or f"it crashes, or takes {CHILD_SECONDS} s of processor time or {CHILD_BYTES >> 30} GiB")


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


if __name__ == "__main__":
    for kind, limit in ((resource.RLIMIT_CPU, CHILD_SECONDS), (resource.RLIMIT_DATA, CHILD_BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError):  # this process already has a lower limit
            resource.setrlimit(kind, (limit, limit))
    parse(sys.stdin.buffer.read())
