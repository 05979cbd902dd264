"""Settings as flags of a command, and flags as part of a card."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any


def add(parser: argparse.ArgumentParser, settings: Mapping[str, Any]) -> None:
    """Add a flag for each setting. `settings` has dataclasses with the defaults, by the family that chooses it."""
    values = {family: asdict(defaults) for family, defaults in settings.items()}
    for name, default in next(iter(values.values())).items():
        shown = "default: " + ", ".join(sorted({str(defaults[name]) for defaults in values.values()}))
        choices = tuple(values) if default in values else None
        parser.add_argument(flag(name), type=type(default), choices=choices, default=argparse.SUPPRESS, help=shown)


def given(flags: argparse.Namespace, settings: Any) -> dict[str, Any]:
    """Return the settings that the caller has set."""
    return {name: value for name, value in vars(flags).items() if name in asdict(settings)}


def words(settings: Any) -> str:
    """Return the flags that give these settings."""
    return " ".join(f"{flag(name)} {value}" for name, value in asdict(settings).items())


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
