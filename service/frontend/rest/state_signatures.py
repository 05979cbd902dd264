"""Signs the session states that leave the service, and refuses imported states that it has not signed. Needs the setting `state_keys`.

A signature also covers the tenant: other tenants cannot import the state. It does not cover the id of the session: a state may be
imported under another id, and more than once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from service.access.state_keys import StateKeys
from service.errors import Forbidden
from service.ipc.session_file import SignedFile, split_signed, with_signature_entry

T = TypeVar("T")
CONTEXT = b"seqserve session state\0"
"""Begins every signed message, so that no other use of the secrets can make a valid signature."""
MAX_LOOP_BYTES = 1 << 18
"""Larger states are signed in a thread: their hash takes more than about a millisecond, without the interpreter lock."""


async def signed(keys: StateKeys, tenant: str, state: bytes | memoryview) -> bytes | memoryview:
    """Return an exported state with the signature for a tenant, or unchanged if states are not signed."""
    if not keys.in_use:
        return state
    return await _run(len(state), lambda: _sign(keys, tenant, state))


async def check_signature(keys: StateKeys, tenant: str, state: bytes) -> None:
    """Raise Forbidden for an imported state without a valid signature for the tenant, unless states are not signed."""
    if keys.in_use and not await _run(len(state), lambda: _is_signed(keys, tenant, state)):
        raise Forbidden(
            "the state has no valid signature for your tenant, and this service requires one (SEQSERVE_STATE_KEYS): send the unchanged "
            "body that GET on this path returned, from a replica with the same secrets, or start a new session"
        )


def _sign(keys: StateKeys, tenant: str, state: bytes | memoryview) -> bytes:
    parts = with_signature_entry(state)
    return b"".join((parts.before, keys.sign(_message(tenant, parts)), parts.after))


def _is_signed(keys: StateKeys, tenant: str, state: bytes) -> bool:
    parts = split_signed(state)
    return parts is not None and keys.verify(_message(tenant, parts), parts.signature)


def _message(tenant: str, parts: SignedFile) -> list[bytes | memoryview]:
    # The names of tenants contain no NUL.
    return [CONTEXT, tenant.encode(), b"\0", parts.before, parts.after]


async def _run(size: int, work: Callable[[], T]) -> T:
    return work() if size <= MAX_LOOP_BYTES else await asyncio.to_thread(work)
