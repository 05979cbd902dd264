"""The changes that wait for the store, in the order of each session. A save that waits is replaced by a newer save of its session."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from service.ipc.messages import SaveSession, TakeSession
from service.store.records import Change

Sender = TypeVar("Sender")
MAX_WAITING_BYTES = 256 << 20
"""Further states are not saved while this many bytes wait: the store is too slow."""
MAX_CHANGES, MAX_BYTES = 256, 16 << 20
"""Of one batch: other changes wait meanwhile."""


class Queued(NamedTuple, Generic[Sender]):
    """A change, the engine that sent it, and when it arrived."""

    change: Change
    sender: Sender
    since: float

    @property
    def is_urgent(self) -> bool:
        """Whether a chunk waits for it, perhaps at another replica."""
        message = self.change.message
        return isinstance(message, TakeSession) or (isinstance(message, SaveSession) and message.releases)


class ChangeQueue(Generic[Sender]):
    """Up to MAX_WAITING_BYTES of states, and any number of changes without a state."""

    def __init__(self) -> None:
        self._changes: OrderedDict[str, list[Queued[Sender]]] = OrderedDict()
        self._bytes = 0

    @property
    def waiting(self) -> int:
        """How many sessions have changes that wait."""
        return len(self._changes)

    def add(self, queued: Queued[Sender]) -> Queued[Sender] | None:
        """Add a change. Returns the save that does not happen: an older save of the session, or this one if too many bytes wait."""
        name, size = queued.change.message.session, len(queued.change.state)
        changes = self._changes.get(name, [])
        replaced = changes.pop() if changes and _replaces(queued, changes[-1]) else None
        if replaced is not None:
            self._bytes -= len(replaced.change.state)
        if self._bytes + size > MAX_WAITING_BYTES:
            return queued
        changes.append(queued)
        self._changes[name] = changes
        self._bytes += size
        if queued.is_urgent:
            self._changes.move_to_end(name, last=False)
        return replaced

    def next_batch(self) -> list[Queued[Sender]]:
        """Remove and return the next changes, with all changes of each session."""
        batch: list[Queued[Sender]] = []
        size = 0
        while self._changes and len(batch) < MAX_CHANGES and size < MAX_BYTES:
            _, changes = self._changes.popitem(last=False)
            batch += changes
            size += sum(len(queued.change.state) for queued in changes)
        self._bytes -= size
        return batch


def _replaces(newer: Queued[Sender], older: Queued[Sender]) -> bool:
    return isinstance(newer.change.message, SaveSession) and isinstance(older.change.message, SaveSession)
