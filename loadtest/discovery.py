"""Requests to a running server: its models, and the words of its text models."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from loadtest import traffic
from service.client_access import ClientAccess, KeyRefused
from service.errors import SettingsError
from service.settings import CLIENT_KEY

NO_ACCESS = ClientAccess()
"""For servers without keys and TLS."""


class CannotMeasure(Exception):
    """A measurement cannot start. The message has the reason, and what to do."""


def add_access_options(parser: argparse.ArgumentParser) -> None:
    """Add the options from which `access_of` reads the access to a running server."""
    parser.add_argument("--key-file", type=Path, help=f"file with the key to send, instead of {CLIENT_KEY}")
    parser.add_argument("--ca", type=Path, help="authority of the server's certificate, instead of the system's")


def access_of(options: argparse.Namespace) -> ClientAccess:
    """Return the access to a running server that the options and the environment name. Raises CannotMeasure."""
    try:
        return ClientAccess.read(options.key_file, options.ca)
    except SettingsError as error:
        raise CannotMeasure(str(error)) from None


def fetch(url: str, access: ClientAccess, body: bytes | None = None, *, timeout: float = 10) -> bytes:
    """Return the reply to a GET, or to a POST with this body.

    Raises CannotMeasure for a refused key, or OSError without a reply or with another status.
    """
    try:
        return access.fetch(url, body, timeout=timeout)
    except KeyRefused as error:
        raise CannotMeasure(str(error)) from error


def served(url: str, access: ClientAccess = NO_ACCESS) -> dict[str, dict[str, Any]]:
    """Return every model by name, in its newest version, as GET /models describes it. Raises CannotMeasure."""
    try:
        return {model["name"]: model for model in json.loads(fetch(f"{url}/models", access))["models"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotMeasure(
            f"{url}/models does not answer like seqserve ({getattr(error, 'reason', error)}): name a running server with --url"
        ) from error


def find(url: str, name: str | None, access: ClientAccess = NO_ACCESS, *, streams: bool = False) -> dict[str, Any]:
    """Return the model with this name or alias, or the first when `name` is None. Raises CannotMeasure. streams: it has sessions."""
    models = {known: model for known, model in served(url, access).items() if model["streams"] or not streams}
    for model in models.values():
        if name is None or name in (model["name"], *model["aliases"]):
            return model
    what = f"model{' with sessions' if streams else ''}{f' {name}' if name else ''}"
    raise CannotMeasure(f"{url} serves no {what}: it serves {', '.join(models) or 'none'}")


def inputs(models: Path, model: dict[str, Any], seed: int = 0) -> traffic.Traffic:
    """Return traffic for a model. Texts need its folder in `models`."""
    return traffic.Traffic(model, words(models, model), seed)


def words(models: Path, model: dict[str, Any]) -> list[str]:
    """Return the words of a text model, or an empty list when its folder is not in `models`."""
    file = models / model["name"] / model["version"] / "tokenizer.json"
    return traffic.words(file.read_text()) if model["input"]["kind"] == "text" and file.is_file() else []
