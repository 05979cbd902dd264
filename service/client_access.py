"""The key and the certificate authority with which our commands reach a running service."""

from __future__ import annotations

import json
import os
import re
import ssl
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from service.errors import SettingsError, StartError
from service.settings import CLIENT_KEY

_TOKEN = re.compile(r"[!-~]+")


class KeyRefused(StartError):
    """The service needs a key, or refuses the given key. The message names the flag for another key."""


class ClientAccess(NamedTuple):
    """key: empty for none. ca: a PEM file of the authority of the service's certificate, None for the authorities of the system."""

    key: str = ""
    ca: Path | None = None

    @classmethod
    def read(cls, key_file: Path | None, ca: Path | None) -> ClientAccess:
        """Return the access with the key in a file, or in the environment if no file is named. Raises SettingsError for a wrong file."""
        access = cls(_key(key_file), ca)
        if ca is not None:
            access.tls()
        return access

    @property
    def headers(self) -> dict[str, str]:
        """The headers that every request needs."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def fetch(self, url: str, body: bytes | None = None, *, timeout: float = 10.0) -> bytes:
        """Return the reply to a GET, or to a POST with this JSON.

        Raises KeyRefused, and OSError without a reply or with another status.
        """
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        for name, value in self.headers.items():
            request.add_unredirected_header(name, value)  # only the named server gets the key
        try:
            with urllib.request.urlopen(
                request, timeout=timeout, context=self.tls() if url.startswith("https:") else None
            ) as response:
                reply: bytes = response.read()
        except urllib.error.HTTPError as error:
            if error.code not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise
            raise KeyRefused(f"{url} answers {error.code}: {reason_of(error)}; {self._remedy}") from error
        return reply

    @property
    def _remedy(self) -> str:
        """What to do if the service refuses this key."""
        if self.key:
            return "name the file of another key with --key-file"
        return f"name its file with --key-file, or set {CLIENT_KEY}"

    def tls(self) -> ssl.SSLContext:
        """Return the context of connections to https addresses. Raises SettingsError for an authority that cannot be read."""
        try:
            return ssl.create_default_context(cafile=self.ca)
        except OSError as error:  # includes ssl.SSLError
            raise SettingsError(f"authority {self.ca}: {error}") from None


def _key(file: Path | None) -> str:
    """Return the key in a file or in the environment, empty for none. Errors do not repeat it."""
    source = CLIENT_KEY if file is None else f"key file {file}"
    try:
        key = (os.environ.get(CLIENT_KEY, "") if file is None else file.read_text()).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{source}: {error}") from None
    if (key or file) and not _TOKEN.fullmatch(key):
        raise SettingsError(
            f"{source} is not one key: it must be one word of ASCII characters, as `seqserve key new` printed it"
        )
    return key


def reason_of(error: urllib.error.HTTPError) -> str:
    """Return the message of a seqserve error, or the status of any other."""
    try:
        return str(json.load(error)["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"status {error.code}"
