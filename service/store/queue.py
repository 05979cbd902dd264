"""The changes that wait for the store, in the order of each session. A save that waits is replaced by a newer save of its session."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from service.ipc.messages.store import SaveSession, TakeSession
from service.store.records import Change

Sender = TypeVar("Sender")
MAX_WAITING_BYTES = 256 << 20
"""Further states are not saved while this many bytes wait: the store is too slow."""
MAX_CHANGES, MAX_BYTES = 256, 16 << 20
"""Of one batch: other changes wait meanwhile."""


class Queued(NamedTuple, Generic[Sender]):
    """A change, the engine that sent it, and when it arrived. is_retried: it may have been made before."""

    change: Change
    sender: Sender
    since: float
    is_retried: bool = False

    @property
    def is_urgent(self) -> bool:
        """Whether a chunk waits for it, perhaps at another replica."""
        message = self.change.message
        return isinstance(message, TakeSession) or (isinstance(message, SaveSession) and message.releases)


class ChangeQueue(Generic[Sender]):
    """Up to MAX_WAITING_BYTES of states, and any number of changes without a state."""

    def __init__(self) -> None:
        self._urgent: OrderedDict[str, list[Queued[Sender]]] = OrderedDict()
        self._others: OrderedDict[str, list[Queued[Sender]]] = OrderedDict()
        self._bytes = 0

    @property
    def waiting(self) -> int:
        """How many sessions have changes that wait."""
        return len(self._urgent) + len(self._others)

    def add(self, queued: Queued[Sender]) -> Queued[Sender] | None:
        """Add a change. Returns the save that does not happen: an older save of the session, or this one if too many bytes wait."""
        name = queued.change.message.session
        changes = self._urgent.get(name) or self._others.get(name, [])
        saves = changes and all(isinstance(each.change.message, SaveSession) for each in (queued, changes[-1]))
        replaced = changes[-1] if saves else None
        added = len(queued.change.state) - (0 if replaced is None else len(replaced.change.state))
        if added > 0 and self._bytes + added > MAX_WAITING_BYTES:
            return queued
        if replaced is not None:
            changes.pop()
        changes.append(queued)
        self._bytes += added
        if queued.is_urgent or name in self._urgent:
            self._others.pop(name, None)
            self._urgent[name] = changes
        else:
            self._others[name] = changes
        return replaced

    def next_batch(self) -> list[Queued[Sender]]:
        """Remove and return the next changes, with all changes of each session."""
        batch: list[Queued[Sender]] = []
        size = 0
        while self.waiting and len(batch) < MAX_CHANGES and size < MAX_BYTES:
            _, changes = (self._urgent or self._others).popitem(last=False)
            batch += changes
            size += sum(len(queued.change.state) for queued in changes)
        self._bytes -= size
        return batch
