"""Changes of bytes and of values, as attackers and broken clients make them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

MOST_CHANGES = 4
TOKENS = (
    *(
        b"",
        b"\0",
        b"\r\n",
        b"\n",
        b"\r\n\r\n",
        b" ",
        b"\t",
        b"\xff",
        b"\xc3\x28",
        b"\xed\xa0\x80",
        b"\xf0\x9f\x8c\x8a",
        b"%00",
        b"%2e%2e%2f",
    ),
    *(b"-1", b"0", b"1e400", b"NaN", b"Infinity", b"-0", b"9223372036854775808", b"99999999999999999999", b"1.5", b"+5"),
    *(
        b"null",
        b"true",
        b"{}",
        b"[]",
        b'""',
        b"{",
        b"[",
        b"]",
        b"}",
        b'"',
        b",",
        b":",
        b"\\u0000",
        b"\\ud800",
        b"[" * 40,
        b'{"a":' * 40,
    ),
    *(
        b"../../etc/passwd",
        b"..\\..\\boot.ini",
        b"/etc/passwd",
        b"%2e%2e/%2e%2e/etc/passwd",
        b"${jndi:ldap://127.0.0.1/a}",
        b"'; DROP TABLE",
    ),
    *(b"x" * 200, b"a" * 2000, b"\x80" * 17, b"\x00\x00\x00\x00\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"chunked", b"gzip"),
)
"""Values that parsers tend to treat specially."""

Change = Callable[[bytearray, random.Random], None]


def _flip(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _replace(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] = chance.randrange(256)


def _delete(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    del data[start : start + chance.randint(1, 8)]


def _insert(data: bytearray, chance: random.Random) -> None:
    at = chance.randint(0, len(data))
    data[at:at] = chance.choice(TOKENS)


def _overwrite(data: bytearray, chance: random.Random) -> None:
    at, token = chance.randrange(len(data)), chance.choice(TOKENS)
    data[at : at + len(token)] = token


def _repeat(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    part = data[start : start + chance.randint(1, 64)]
    data[start:start] = part * chance.randint(1, 4)


def _swap(data: bytearray, chance: random.Random) -> None:
    one, other = chance.randrange(len(data)), chance.randrange(len(data))
    data[one], data[other] = data[other], data[one]


CHANGES: Sequence[Change] = (_flip, _flip, _replace, _delete, _insert, _insert, _overwrite, _repeat, _swap)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one or more changes."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, MOST_CHANGES)):
        if not changed:
            break
        chance.choice(CHANGES)(changed, chance)
    return bytes(changed)


def pieces(data: bytes, chance: random.Random) -> list[bytes]:
    """Return the bytes as a client sends them: mostly at once, sometimes in pieces."""
    way = chance.random()
    if way < 0.7 or len(data) < 2:
        return [data]
    cuts = sorted(chance.sample(range(1, len(data)), min(len(data) - 1, 1 if way < 0.9 else chance.randint(2, 12))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
