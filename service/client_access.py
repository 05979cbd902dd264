"""The key and the certificate authority with which our commands reach a running service."""

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
        access = cls(_key(key_file), ca)
        if ca is not None:
            access.tls()
        return access

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
