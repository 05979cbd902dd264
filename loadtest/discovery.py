"""What a running server serves, and the words of its text models."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from loadtest import traffic


class NoServer(Exception):
    """Nobody answers at this address as seqserve does; the message says what was tried."""


def served(url: str) -> dict[str, dict[str, Any]]:
    """Every model by its name, in its newest version, as GET /models describes it; raises NoServer."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=10) as answer:
            return {one["name"]: one for one in json.load(answer)["models"]}
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise NoServer(
            f"{url}/models is not answered as seqserve answers it ({getattr(fault, 'reason', fault)}): name one with --url"
        ) from fault


def inputs(models: Path, model: dict[str, Any], seed: int = 0) -> traffic.Traffic:
    """Inputs for a model, of words where its folder is among `models`."""
    return traffic.Traffic(model, words(models, model), seed)


def words(models: Path, model: dict[str, Any]) -> list[str]:
    """A text model's words, when its folder is among `models`."""
    file = models / model["name"] / model["version"] / "tokenizer.json"
    return traffic.words(file.read_text()) if model["input"]["kind"] == "text" and file.is_file() else []
