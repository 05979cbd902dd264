"""The file of keys: named, with scopes and a tenant, each stored as a salted hash.

A token is `id.secret`. The id finds the key. The secret is 256 random bits, which cannot be guessed, so one salted SHA-256 protects it as
well as a slow hash would, and a check takes about a microsecond.
"""

from __future__ import annotations

import os
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.access.caller import ANYBODY, Caller
from service.access.scopes import KEY_SCOPES, Scope, with_implied
from service.errors import SettingsError

ID_BYTES, SALT_BYTES, SECRET_BYTES = 8, 16, 32
MAX_TOKEN_CHARACTERS = 128
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Pattern of the names of keys and tenants. No separator of a tenant's session ids is in it."""
HEADER = "# Keys of seqserve. `seqserve key new NAME` adds one; delete a table to revoke its key. The service reads changes by itself.\n"


@dataclass(frozen=True, slots=True)
class Key:
    """A key, without its secret: the caller that it identifies, and the salted hash of the secret."""

    caller: Caller
    salt: bytes
    digest: bytes


_NO_KEY = Key(ANYBODY, bytes(SALT_BYTES), bytes(sha256().digest_size))
"""Stands in for an unknown id, so that its check takes as long as that of a wrong secret."""


class _KeyTable(BaseModel):
    """One table of the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    tenant: Annotated[str, Field(pattern=f"^{NAME}$")]
    scopes: list[Annotated[str, Field(pattern="^(" + "|".join(KEY_SCOPES) + ")$")]]
    max_priority: Annotated[int, Field(ge=-10, le=10)] = 0
    max_sessions: Annotated[int, Field(ge=0)] = 0
    salt: Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * SALT_BYTES}}}$")]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    def key(self) -> Key:
        caller = Caller(self.name, self.tenant, with_implied(map(Scope, self.scopes)), self.max_priority, self.max_sessions)
        return Key(caller, bytes.fromhex(self.salt), bytes.fromhex(self.sha256))


class KeyRing:
    """The keys of one file, by id."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self._keys = keys

    @classmethod
    def read(cls, file: Path) -> KeyRing:
        """Raises SettingsError for a file that cannot be read or has a wrong table."""
        try:
            tables = tomllib.loads(file.read_text())
            return cls({id: _KeyTable.model_validate(table).key() for id, table in tables.items()})
        except ValidationError as error:
            detail = error.errors()[0]
            raise SettingsError(f"key file {file}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"key file {file}: {error}") from None

    def names(self) -> set[str]:
        return {key.caller.name for key in self._keys.values()}

    def find(self, token: str) -> Caller | None:
        """Return the caller that a token identifies, None for an unknown id or a wrong secret. Both take the same time."""
        if len(token) > MAX_TOKEN_CHARACTERS:
            return None
        id, _, secret = token.partition(".")
        key = self._keys.get(id, _NO_KEY)
        matches = compare_digest(sha256(key.salt + secret.encode()).digest(), key.digest)
        return key.caller if matches and key is not _NO_KEY else None


def create(file: Path, name: str, scopes: Sequence[Scope], tenant: str, max_priority: int = 0, max_sessions: int = 0) -> str:
    """Add a key to a file, which is created if it is missing. Returns the token, which is stored nowhere.

    Raises SettingsError for a name that another key has, or for a file that cannot be read or written.
    """
    if file.exists() and name in KeyRing.read(file).names():
        raise SettingsError(f"key file {file} already has a key named {name}: choose another name, or delete that key")
    id, salt, secret = secrets.token_hex(ID_BYTES), secrets.token_bytes(SALT_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    table = {
        "name": name,
        "tenant": tenant,
        "scopes": [scope.value for scope in scopes],
        "max_priority": max_priority,
        "max_sessions": max_sessions,
        "salt": salt.hex(),
        "sha256": sha256(salt + secret.encode()).hexdigest(),
    }
    try:
        checked = _KeyTable.model_validate(table)
    except ValidationError as error:
        detail = error.errors()[0]
        raise SettingsError(f"{'.'.join(map(str, detail['loc']))} is {detail['input']!r}: {detail['msg']}") from None
    _append(file, id, checked)
    return f"{id}.{secret}"


def _append(file: Path, id: str, table: _KeyTable) -> None:
    """Write a table behind those in the file, in one call: a service that reads the file meanwhile sees all of it or nothing."""
    # The patterns of names, scopes and digests leave nothing to escape: a value in TOML reads as its representation in Python.
    lines = "".join(f"{name} = {value!r}\n" for name, value in table.model_dump().items())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            header = "" if os.fstat(descriptor).st_size else HEADER
            os.write(descriptor, f"{header}\n[{id!r}]\n{lines}".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SettingsError(f"key file {file}: {error}") from None
