"""Sends sequences and streams to a running service over HTTP."""

from __future__ import annotations

import argparse
import json
import os
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from uuid import uuid4

import numpy as np

INPUTS_PER_REQUEST = 50
TIMEOUT = 60.0
CALLERS = 8
"""Sessions that are open at once."""

Advance = Callable[[float], None]
"""Is told how many sequences or streams were answered."""


def ignore(amount: float) -> None:
    """Show no progress."""


class Service:
    """A service at an address, with the key that it needs if it has keys. Its methods raise OSError without an answer."""

    def __init__(self, url: str, key_file: Path | None = None, ca: Path | None = None) -> None:
        self.url = url
        self._key = (key_file.read_text() if key_file else os.environ.get("SEQSERVE_CLIENT_KEY", "")).strip()
        self._tls = ssl.create_default_context(cafile=ca)

    def fetch_json(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Return the decoded answer. body: may have arrays. Without a method, a request with a body is a POST and any other a GET."""
        with closing(self._connection()) as connection:
            return self._fetch(connection, path, body, method)

    def _connection(self) -> HTTPConnection:
        address = urlsplit(self.url)
        if address.scheme == "https":
            return HTTPSConnection(address.netloc, timeout=TIMEOUT, context=self._tls)
        return HTTPConnection(address.netloc, timeout=TIMEOUT)

    def _fetch(self, connection: HTTPConnection, path: str, body: Any, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body, default=np.ndarray.tolist)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        connection.request(method or ("POST" if data else "GET"), path, data, headers)
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            raise HTTPError(f"{self.url}{path}", answer.status, answer.reason, answer.headers, answer)
        return json.load(answer)

    def models(self) -> dict[str, Any]:
        """Return the descriptions of the served models by name."""
        return {model["name"]: model for model in self.fetch_json("/models")["models"]}

    def outputs(self, model: str, inputs: Sequence[Any], advance: Advance = ignore) -> list[Any]:
        """Return the output for each sequence."""
        outputs = []
        for first in range(0, len(inputs), INPUTS_PER_REQUEST):
            part = list(inputs[first : first + INPUTS_PER_REQUEST])
            outputs += self.fetch_json("/infer", {"model": model, "inputs": part})["outputs"]
            advance(len(part))
        return outputs

    def streams(self, model: str, streams: Sequence[Sequence[Any]], advance: Advance = ignore) -> list[list[Any]]:
        """Return the outputs of each stream, which is a session that gets one chunk after the other."""
        with ThreadPoolExecutor(CALLERS) as callers:
            return list(callers.map(partial(self._stream, model, advance), streams))

    def _stream(self, model: str, advance: Advance, chunks: Sequence[Any]) -> list[Any]:
        session, outputs = f"stream-{uuid4().hex}", []
        with closing(self._connection()) as connection:
            for number, chunk in enumerate(chunks, 1):
                body = {"model": model, "session": session, "inputs": [chunk], "end": number == len(chunks)}
                outputs += self._fetch(connection, "/infer", body)["outputs"]
        advance(1)
        return outputs


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the service."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (default: %(default)s)")
    parser.add_argument("--key-file", type=Path, help="file with the key to send (default: $SEQSERVE_CLIENT_KEY is the key)")
    parser.add_argument("--ca", type=Path, help="authority of the service's certificate (default: the system's authorities)")


def problem(flags: argparse.Namespace, error: OSError) -> str:
    """Return a message about a service that does not answer as it should."""
    if isinstance(error, HTTPError):
        return f"{flags.url} answers {error.code} {error.reason}: if it has keys, name a file with one with --key-file"
    return f"no answer from {flags.url} ({error}): start the service with make serve, or pass its address with --url"
