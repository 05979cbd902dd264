"""Quote what a client sent in an error message: short, and on one line."""

from __future__ import annotations

import re
from typing import Any

QUOTED_CHARACTERS = 100
"""An error message repeats at most this many characters of a client's text."""
_KINDS: dict[type, str] = {str: "a string", bytes: "bytes", list: "a list", dict: "an object"}


def quote(text: str) -> str:
    """Return a client's text in printable ASCII, cut to QUOTED_CHARACTERS."""
    printable = re.sub(r"[^\x20-\x7e]", "?", text[: QUOTED_CHARACTERS + 1])
    return printable if len(printable) <= QUOTED_CHARACTERS else printable[:QUOTED_CHARACTERS] + "..."


def describe_value(value: Any) -> str:
    """Return a number, a boolean or null as it is, and the JSON type of any other value."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, int | float):
        return quote(str(value))
    return _KINDS[type(value)]
