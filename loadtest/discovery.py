"""The models of a running server, and the words of its text models."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from loadtest import traffic


class CannotMeasure(Exception):
    """A measurement cannot start. The message has the reason, and what to do."""


class NoServer(CannotMeasure):
    """No seqserve server answers at an address, or it does not serve the named model."""


def served(url: str) -> dict[str, dict[str, Any]]:
    """Return every model by name, in its newest version, as GET /models describes it. Raises NoServer."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=10) as response:
            return {model["name"]: model for model in json.load(response)["models"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoServer(
            f"{url}/models does not answer like seqserve ({getattr(error, 'reason', error)}): name a running server with --url"
        ) from error


def find(url: str, name: str | None) -> dict[str, Any]:
    """Return the model with this name or alias, or the first model when `name` is None. Raises NoServer."""
    models = served(url)
    for model in models.values():
        if name is None or name in (model["name"], *model["aliases"]):
            return model
    raise NoServer(f"{url} serves no model {name}: it serves {', '.join(models)}")


def inputs(models: Path, model: dict[str, Any], seed: int = 0) -> traffic.Traffic:
    """Return traffic for a model. Texts need its folder in `models`."""
    return traffic.Traffic(model, words(models, model), seed)


def words(models: Path, model: dict[str, Any]) -> list[str]:
    """Return the words of a text model, or an empty list when its folder is not in `models`."""
    file = models / model["name"] / model["version"] / "tokenizer.json"
    return traffic.words(file.read_text()) if model["input"]["kind"] == "text" and file.is_file() else []
