"""What a caller sent, as a message repeats it: short, and on one line."""

from __future__ import annotations

import re
from typing import Any

SHOWN_CHARACTERS = 100
"""At most this much of what a caller sent is repeated in a message."""


def kind(value: Any) -> str:
    """What a caller sent, in JSON's words."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, int | float):
        return shown(str(value))
    kinds: dict[type, str] = {str: "a string", bytes: "bytes", list: "a list", dict: "an object"}
    return kinds[type(value)]


def shown(text: str) -> str:
    """A piece of what a caller sent, short and on one line."""
    clean = re.sub(r"[^\x20-\x7e]", "?", text[: SHOWN_CHARACTERS + 1])
    return clean if len(clean) <= SHOWN_CHARACTERS else clean[:SHOWN_CHARACTERS] + "..."
