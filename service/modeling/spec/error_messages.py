"""Describes the errors of a model.toml in terms of the file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import ValidationError

from service.modeling.spec.heads import HEAD_KINDS
from service.modeling.spec.layers import LAYER_KINDS

MAX_SHOWN = 80
"""Characters of a wrong value in an error."""
MAX_MESSAGES = 16
"""Errors of a file that are described."""
Location = tuple[int | str, ...]


class _Problem(NamedTuple):
    """An error of pydantic. location: keys and indices in the file. kind, message, context: as pydantic has them."""

    location: Location
    kind: str
    message: str
    value: Any
    context: dict[str, Any]

    def describe(self, others: Iterable[_Problem]) -> str:
        """Return the problem and the remedy."""
        match self.kind:
            case "value_error":
                return self.message.removeprefix("Value error, ")
            case "missing":
                return "this key is missing: add it"
            case "extra_forbidden":
                return f"unknown key: {self._meant(others) or 'remove it or correct its name'}"
            case "union_tag_invalid":
                return f"kind is {shortened(self.context['tag'])}: use one of {self.context['expected_tags']}"
            case "union_tag_not_found":
                return "the key kind is missing: add it"
        requirement = re.sub(r"^\w+ should", "should", self.message).replace(" after validation", "")
        return f"the value is {shortened(self.value)}: it {requirement}"

    def _meant(self, others: Iterable[_Problem]) -> str | None:
        """Return a question for an unknown key with nearly the name of a missing key."""
        *table, key = self.location
        missing = [str(other.location[-1]) for other in others if other.kind == "missing" and [*other.location[:-1]] == table]
        near = difflib.get_close_matches(str(key), missing, 1)
        return f"did you mean {near[0]}?" if near else None


def error_messages(invalid: ValidationError) -> list[str]:
    """Return each error with its place in the file."""
    problems = [
        _Problem(_location(error["loc"]), error["type"], error["msg"], error["input"], error.get("ctx", {}))
        for error in invalid.errors(include_url=False)
    ]
    # A list without its wrong items is too short: the items have their own errors.
    inside = {problem.location[:1] for problem in problems if len(problem.location) > 1}
    problems = [problem for problem in problems if problem.kind != "too_short" or problem.location not in inside]
    shown = problems[:MAX_MESSAGES]
    places = [
        "the whole file" if not problem.location else ".".join(map(str, problem.location))[:MAX_SHOWN] for problem in shown
    ]
    return [f"{place}: {problem.describe(problems)}" for place, problem in zip(places, shown, strict=True)]


def _location(parts: Location) -> Location:
    """Return where an error is. A discriminated union adds its tag; the author of a TOML file knows only keys and indices."""
    match parts:
        case ("layers", index, kind, *rest) if kind in LAYER_KINDS:
            return ("layers", index, *rest)
        case ("head", kind, "pool", int()) if kind in HEAD_KINDS:
            return ("head", "pool")  # one pool is written without a list
        case ("head", kind, *rest) if kind in HEAD_KINDS:
            return ("head", *rest)
    return parts


def shortened(value: object) -> str:
    """Return a value as text, without its end if it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: an integer of many digits
        return "too long to show"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
