"""The model versions that may be the cause if this engine ends now: each version that it loads, or whose first batch runs.

The supervisor and the frontends learn of each trial before it begins, because an engine that ends has no time to tell them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.ipc.channel import Channel, send_now
from service.ipc.messages.inference import TrialBegan, TrialEnded
from service.ipc.messages.message import Message
from service.ipc.messages.models import ModelKey


class TrialReports:
    """Tells the supervisor, and the frontends that are attached, about the trials of this engine."""

    def __init__(self, control: Channel) -> None:
        self._channels = [control]
        self._loading: set[ModelKey] = set()
        self.running: set[ModelKey] = set()
        """The versions whose first batch runs."""
        self.passed: set[ModelKey] = set()
        """The versions that have completed a batch."""

    def attach(self, channel: Channel) -> None:
        """Tell a frontend the running trials, and every later trial."""
        for key in (*self._loading, *self.running):
            send_now(channel, TrialBegan(key))
        for key in self.passed:
            send_now(channel, TrialEnded(key, ran=True))
        self._channels.append(channel)

    def detach(self, channel: Channel) -> None:
        """Stop telling a frontend. The supervisor stays."""
        if channel in self._channels[1:]:
            self._channels.remove(channel)

    @contextmanager
    def load(self, key: ModelKey) -> Iterator[None]:
        """Report a trial while the version is loaded, or warmed up, within the context."""
        self.begin_load(key)
        try:
            yield
        finally:
            self.end_load(key)

    def begin_load(self, key: ModelKey) -> None:
        self._loading.add(key)
        self._tell(TrialBegan(key))

    def end_load(self, key: ModelKey) -> None:
        self._loading.discard(key)
        self._tell(TrialEnded(key, ran=False))

    def begin_batch(self, key: ModelKey) -> None:
        """Report a batch that is about to start. Only the first batch of a version is a trial."""
        if key not in self.passed and key not in self.running:
            self.running.add(key)
            self._tell(TrialBegan(key))

    def end_batches(self, runs: Callable[[ModelKey], bool]) -> None:
        """End the trial of each version whose batches have ended."""
        for key in [key for key in self.running if not runs(key)]:
            self.running.discard(key)
            self.passed.add(key)
            self._tell(TrialEnded(key, ran=True))

    def forget(self, key: ModelKey) -> None:
        """Forget a version that is unloaded."""
        self.passed.discard(key)

    def _tell(self, message: Message) -> None:
        for channel in self._channels:
            send_now(channel, message)
