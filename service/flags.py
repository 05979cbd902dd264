"""The parser of the commands: flags of settings and numbers, and hints at mistyped words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from typing import Any, TypeVar

from service.settings import PREFIX, Settings, nearest

T = TypeVar("T", int, float)


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistyped command or flag with the nearest one, and shows the default of a flag in its help. Its commands are
    parsers of this class too."""

    def add_argument(self, *names: str, help: str | None = None, **options: Any) -> argparse.Action:
        shown = "" if options.get("default") in (None, argparse.SUPPRESS) else " (default: %(default)s)"
        return super().add_argument(*names, help=f"{help or ''}{shown}", **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        unknown = [
            word
            for word in takewhile("--".__ne__, () if self._subparsers else args or ())
            if word.startswith("--") and " " not in word and not any(flag.startswith(word.partition("=")[0]) for flag in flags)
        ]
        if not unknown:  # otherwise a mistyped flag that is required would only be reported as missing
            namespace, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            flag = word.partition("=")[0].replace("_", "-")
            setting = flag.removeprefix("--").replace("-", "_")
            if not flag.startswith("-"):
                hint = f"see {self.prog} --help"
            elif setting in Settings.model_fields and flag not in flags:
                hint = f"it is no flag here, set the variable {PREFIX}{setting.upper()}"
            else:
                hint = nearest(flag, flags)
            self.error(f"unknown argument {word}: {hint}")
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"{value!r} is unknown: {nearest(str(value), map(str, action.choices))}")


def above_zero(kind: type[T]) -> Callable[[str], T]:
    """Return a parser of numbers above zero."""

    def read(word: str) -> T:
        with suppress(ValueError):
            if 0 < (number := kind(word)) < float("inf"):
                return number
        raise argparse.ArgumentTypeError(f"{word!r} is not a number above zero")

    return read


def listed(kind: type[T]) -> Callable[[str], list[T]]:
    """Return a parser of numbers above zero, separated by commas."""

    def read(word: str) -> list[T]:
        return [above_zero(kind)(part) for part in word.split(",")]

    return read


def add_settings(parser: argparse.ArgumentParser, **metavars: str | None) -> None:
    """Add flags that override settings, which have the checks, the defaults and the descriptions. A flag without a metavar has no value."""
    for name, metavar in metavars.items():
        field = Settings.model_fields[name]
        default = {"": "none", False: "off"}.get(field.default, field.default)
        first = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".")
        value: dict[str, Any] = {"action": "store_true"} if metavar is None else {"metavar": metavar}
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, help=f"{first} (default: {default})", **value)
