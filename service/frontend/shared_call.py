"""Calls whose result many callers share, so that a thousand callers at a time cost little more than one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class SharedCall(Generic[T]):
    """A call that runs once at a time. All callers that wait for it to end share the next one, which begins after their calls."""

    def __init__(self, call: Callable[[], Awaitable[T]]) -> None:
        self._call = call
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """Return the result of a call that begins now or later. A caller that is cancelled does not end the call of the others."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running))
            self._next.add_done_callback(lambda call: call.cancelled() or call.exception())  # all callers may have been cancelled
        return await asyncio.shield(self._next)

    async def _run(self, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await self._call()


class Forms:
    """What was made of the newest result of a shared call, by key."""

    def __init__(self) -> None:
        self._result: object = None
        self._made: dict[Hashable, Any] = {}

    def get(self, result: object, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made of this result for a key, or make it."""
        if result is not self._result:
            self._result, self._made = result, {}
        if key not in self._made:
            self._made[key] = make()
        return cast(T, self._made[key])
