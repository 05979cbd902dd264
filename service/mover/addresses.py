"""The addresses of the other replicas, which are looked up again every few seconds."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path
from typing import NamedTuple

DNS, FILE = "dns:", "file:"
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:,]+):([0-9]{1,5})")


class Address(NamedTuple):
    host: str
    port: int


class CannotLookUp(Exception):
    """The addresses cannot be looked up now."""


async def look_up(peers: str) -> set[Address]:
    """Return the addresses that the setting `peers` names now. Raises CannotLookUp."""
    if peers.startswith(DNS):
        return await _resolve(_parse(peers.removeprefix(DNS)))
    if peers.startswith(FILE):
        try:
            lines = Path(peers.removeprefix(FILE)).read_text().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CannotLookUp(str(error)) from None
        return {_parse(line.strip()) for line in lines if line.strip() and not line.startswith("#")}
    return {_parse(part) for part in peers.split(",")}


def _parse(text: str) -> Address:
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise CannotLookUp(f"{text[:100]!r} is not HOST:PORT")
    return Address(match[1].strip("[]"), int(match[2]))


async def _resolve(named: Address) -> set[Address]:
    """Return every address that a name has."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(named.host, named.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CannotLookUp(f"{named.host}: {error}") from None
    return {Address(str(address[0]), named.port) for *_, address in found}
