"""A stand-in for a child process of the supervisor."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from service.errors import ServiceError
from service.ipc.messages.control import CloseModel
from service.ipc.messages.message import Done
from service.ipc.messages.models import ModelKey
from service.metrics import Snapshot


@dataclass(eq=False)
class FakeChild:
    """A process that replies Done to each call, unless another reply or an error is set. Unloading waits for `unused`."""

    name: str
    errors: dict[type, ServiceError] = field(default_factory=dict)
    replies: dict[type, Any] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)
    timeouts: set[float | None] = field(default_factory=set)
    killed: str = ""
    ready: bool = True
    hung: bool = False
    exited: bool = False

    def __post_init__(self) -> None:
        self.role = self.name.partition("-")[0]
        self.ended = asyncio.Event()
        self.unused = asyncio.Event()
        self.on_trial: set[ModelKey] = set()
        self.survived: set[ModelKey] = set()
        self.ran: set[ModelKey] = set()
        self.not_loaded: set[ModelKey] = set()
        self.metrics: Snapshot = {}
        self.failure: str | None = None
        self.exit_reason = "ended"
        self.place = int(self.name.partition("-")[2])
        self.process = SimpleNamespace(pid=1)

    async def call(self, message: Any, reply: type, *, timeout: float | None = None) -> Any:
        self.calls.append(message)
        self.timeouts.add(timeout)
        await asyncio.sleep(0)
        if type(message) in self.errors:
            raise self.errors[type(message)]
        if isinstance(message, CloseModel) and message.seconds:
            await self.unused.wait()
        return self.replies.get(type(message), Done())

    def send(self, message: Any, id: int = 0) -> None:
        self.calls.append(message)

    def kill(self, reason: str) -> None:
        self.killed = self.exit_reason = reason
        self.ended.set()

    async def reap(self) -> int:
        return 1

    def took(self, kind: type) -> list[Any]:
        return [message for message in self.calls if isinstance(message, kind)]
