"""How our commands that talk to a running service reach it: with which key, and whose certificates they trust."""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path
from typing import NamedTuple

from service.errors import SettingsError
from service.settings import CLIENT_KEY

_TOKEN = re.compile(r"[!-~]+")


class ClientAccess(NamedTuple):
    """key: empty for none. ca: a PEM file of the authority of the service's certificate, None for the authorities of the system."""

    key: str = ""
    ca: Path | None = None

    @classmethod
    def read(cls, key_file: Path | None, ca: Path | None) -> ClientAccess:
        """Return the access with the key in a file, or without a file in the environment. Raises SettingsError for a wrong file."""
        if key_file is None:
            return cls(_checked(os.environ.get(CLIENT_KEY, ""), CLIENT_KEY), ca)
        try:
            return cls(_checked(key_file.read_text(), f"key file {key_file}"), ca)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"key file {key_file}: {error}") from None

    @property
    def headers(self) -> dict[str, str]:
        """The headers that every request needs."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def tls(self) -> ssl.SSLContext:
        """Return the context of connections to https addresses. Raises SettingsError for an authority that cannot be read."""
        try:
            return ssl.create_default_context(cafile=self.ca)
        except OSError as error:  # ssl.SSLError is one
            raise SettingsError(f"authority {self.ca}: {error}") from None


def _checked(text: str, source: str) -> str:
    """Return a key without the white space around it. Errors do not repeat it."""
    key = text.strip()
    if key and not _TOKEN.fullmatch(key):
        raise SettingsError(
            f"{source} is not one key: it must be one word of ASCII characters, as `seqserve key new` printed it"
        )
    return key
