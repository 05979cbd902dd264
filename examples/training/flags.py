"""Settings as flags of a command, and flags as part of a card."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any


def add(parser: argparse.ArgumentParser, settings: Mapping[str, Any]) -> None:
    """Add a flag for each setting. `settings` has dataclasses with the defaults, by the word that chooses it, such as an encoder."""
    values = {word: asdict(defaults) for word, defaults in settings.items()}
    for name, default in next(iter(values.values())).items():
        if isinstance(default, bool):
            parser.add_argument(flag(name), action="store_true", default=argparse.SUPPRESS)
        else:
            defaults = ", ".join(sorted({str(settings[name]) for settings in values.values()}))
            choices = tuple(values) if default in values else None
            parser.add_argument(
                flag(name), type=type(default), choices=choices, default=argparse.SUPPRESS, help=f"default: {defaults}"
            )


def given(flags: argparse.Namespace, settings: Any) -> dict[str, Any]:
    """Return the settings that the caller has set."""
    return {name: value for name, value in vars(flags).items() if name in asdict(settings)}


def words(settings: Any) -> str:
    """Return the flags that give these settings."""
    values = asdict(settings).items()
    return " ".join(flag(name) if value is True else f"{flag(name)} {value}" for name, value in values if value is not False)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
