"""The file of secrets that sign exported session states. All replicas of a service have the same secrets.

The first secret signs, and every secret verifies. To replace a secret, append the new one, make it the first when all replicas know it,
and delete the old one when no state with its signature is needed any more.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
from collections.abc import Sequence
from hmac import compare_digest
from hmac import new as new_hmac
from pathlib import Path

from service.access.modification import modification
from service.errors import SettingsError
from service.settings import Settings

SECRET_BYTES = 32
MIN_DISTINCT_BYTES = 16
"""Limit for a secret. 32 random bytes have fewer distinct values in less than one of 10^16 secrets."""
MAX_SECRETS = 8
"""A message with a wrong signature is compared with the signature of each secret, and each takes a pass over the message."""
HEADER = "# Secrets of seqserve that sign session states. The first signs, and all verify. All replicas need the same file.\n"
_HEX = re.compile(r"([0-9A-Fa-f]{2})+")


class StateKeys:
    """The secrets of one service, or none without the setting `state_keys`."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError for a file that cannot be read or has a wrong secret."""
        self._file = Path(settings.state_keys) if settings.state_keys else None
        self._modified = modification(self._file)
        self._secrets = [] if self._file is None else _read(self._file)

    @property
    def in_use(self) -> bool:
        """Whether there are secrets."""
        return bool(self._secrets)

    def reload(self) -> bool:
        """Read the file again if it has changed, and return whether it has.

        Raises SettingsError and keeps the old secrets if the file is wrong.
        """
        modified = modification(self._file)
        if self._file is None or modified == self._modified:
            return False
        self._modified = modified
        self._secrets = _read(self._file)
        return True

    def sign(self, parts: Sequence[bytes | memoryview]) -> bytes:
        """Return the signature of a message that consists of these parts: an HMAC-SHA256 in hexadecimal digits."""
        return _signature(self._secrets[0], parts)

    def verify(self, parts: Sequence[bytes | memoryview], signature: bytes) -> bool:
        """Return whether a secret of the file made this signature of a message. The comparison takes constant time."""
        matches = [compare_digest(_signature(secret, parts), signature) for secret in self._secrets]
        return any(matches)


def create(file: Path) -> int:
    """Append a new secret to a file, which is created if it is missing. Returns the number of its secrets.

    Raises SettingsError for a file that has other content, that has no room for a secret, or that cannot be written.
    """
    count = len(_read(file)) if file.exists() else 0
    if count == MAX_SECRETS:
        raise SettingsError(
            f"state key file {file} has {count} secrets, which is the limit: delete a secret that is not in use"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # A last line without an end would become one line with the secret.
            before = HEADER if not count else "" if file.read_bytes().endswith(b"\n") else "\n"
            os.write(descriptor, f"{before}{secrets.token_urlsafe(SECRET_BYTES)}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SettingsError(f"state key file {file}: {error}") from None
    return count + 1


def _signature(secret: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
    digest = new_hmac(secret, digestmod="sha256")
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()


def _read(file: Path) -> list[bytes]:
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"state key file {file}: {error}") from None
    found = [_secret(file, number, line) for number, line in enumerate(lines, start=1) if line and not line.startswith("#")]
    if not 0 < len(found) <= MAX_SECRETS:
        raise SettingsError(
            f"state key file {file} has {len(found)} secrets: write 1 to {MAX_SECRETS} secrets, one on each line "
            f"(seqserve state-key new creates one)"
        )
    return found


def _secret(file: Path, number: int, line: str) -> bytes:
    """Return the secret on a line. Errors do not repeat it."""
    place = f"state key file {file}, line {number}"
    try:
        secret = bytes.fromhex(line) if _HEX.fullmatch(line) else _from_base64(line)
    except ValueError:
        raise SettingsError(
            f"{place}: the secret is neither hexadecimal nor base64url: write one secret on each line"
        ) from None
    if len(secret) < SECRET_BYTES or len(set(secret)) < MIN_DISTINCT_BYTES:
        problem = f"the secret has {len(secret)} bytes, {len(set(secret))} of them distinct"
        raise SettingsError(
            f"{place}: {problem}: use {SECRET_BYTES} or more random bytes (seqserve state-key new creates them)"
        )
    return secret


def _from_base64(line: str) -> bytes:
    text = line.rstrip("=")
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
