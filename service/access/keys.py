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

from service.access.caller import ANYBODY, Caller, Quotas
from service.access.scopes import KEY_SCOPES, Scope, with_implied
from service.errors import SettingsError
from service.ipc.messages.inference import Share

ID_BYTES, SALT_BYTES, SECRET_BYTES = 8, 16, 32
MAX_TOKEN_CHARACTERS = 128
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
Limit = Annotated[int, Field(ge=0)]
"""0 means no limit."""
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
    weight: Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    max_sessions: Limit = 0
    max_requests_per_second: Limit = 0
    max_bytes_per_second: Limit = 0
    max_sequences_in_flight: Limit = 0
    salt: Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * SALT_BYTES}}}$")]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    def key(self, id: str) -> Key:
        quotas = Quotas(self.max_requests_per_second, self.max_bytes_per_second, self.max_sequences_in_flight)
        share, scopes = Share(self.tenant, self.weight), with_implied(map(Scope, self.scopes))
        caller = Caller(self.name, share, scopes, self.max_priority, self.max_sessions, quotas, id)
        return Key(caller, bytes.fromhex(self.salt), bytes.fromhex(self.sha256))


class KeyRing:
    """The keys of one file, by id."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self._keys = keys

    @classmethod
    def read(cls, file: Path) -> KeyRing:
        """Raises SettingsError for a file that cannot be read or has a wrong table."""
        return cls({id: table.key(id) for id, table in _read_tables(file).items()})

    def current(self, id: str) -> Caller | None:
        """Return the caller that the key with this id identifies, None if the key no longer exists."""
        key = self._keys.get(id)
        return None if key is None else key.caller

    def find(self, token: str) -> Caller | None:
        """Return the caller that a token identifies, None for an unknown id or a wrong secret. Both take the same time."""
        if len(token) > MAX_TOKEN_CHARACTERS:
            return None
        id, _, secret = token.partition(".")
        key = self._keys.get(id, _NO_KEY)
        matches = compare_digest(sha256(key.salt + secret.encode()).digest(), key.digest)
        return key.caller if matches and key is not _NO_KEY else None


def create(file: Path, name: str, scopes: Sequence[Scope], tenant: str, **limits: float) -> str:
    """Add a key to a file, which is created if it is missing. Returns the token, which is stored nowhere.

    limits: the values of `weight` and of entries that begin with `max_`, as in the file. Raises SettingsError for a name that another key
    has, for a value that the file may not have, or for a file that cannot be read or written.
    """
    tables = _read_tables(file) if file.exists() else {}
    if name in [table.name for table in tables.values()]:
        raise SettingsError(f"key file {file} already has a key named {name}: choose another name, or delete that key")
    id, salt, secret = secrets.token_hex(ID_BYTES), secrets.token_bytes(SALT_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    table = {
        "name": name,
        "tenant": tenant,
        "scopes": [scope.value for scope in scopes],
        **limits,
        "salt": salt.hex(),
        "sha256": sha256(salt + secret.encode()).hexdigest(),
    }
    try:
        checked = _KeyTable.model_validate(table)
    except ValidationError as error:
        detail = error.errors()[0]
        raise SettingsError(f"{'.'.join(map(str, detail['loc']))} is {detail['input']!r}: {detail['msg']}") from None
    _check_weights(file, {**tables, id: checked})
    _append(file, id, checked)
    return f"{id}.{secret}"


def _read_tables(file: Path) -> dict[str, _KeyTable]:
    """Return the tables of a file by id. Raises SettingsError."""
    try:
        tables = {id: _KeyTable.model_validate(table) for id, table in tomllib.loads(file.read_text()).items()}
    except ValidationError as error:
        detail = error.errors()[0]
        raise SettingsError(f"key file {file}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"key file {file}: {error}") from None
    _check_names(file, tables)
    _check_weights(file, tables)
    return tables


def _check_names(file: Path, tables: Mapping[str, _KeyTable]) -> None:
    """Raise SettingsError if two keys have the same name: the log and the quotas tell keys apart by their names."""
    names = [table.name for table in tables.values()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(f"key file {file}: two keys are named {twice[0]}: give each key a name of its own")


def _check_weights(file: Path, tables: Mapping[str, _KeyTable]) -> None:
    """Raise SettingsError if keys of one tenant have different weights."""
    weights: dict[str, float] = {}
    for table in tables.values():
        if weights.setdefault(table.tenant, table.weight) != table.weight:
            raise SettingsError(
                f"key file {file}: keys of the tenant {table.tenant} have the weights {weights[table.tenant]:g} and "
                f"{table.weight:g}: give all of them one weight"
            )


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
