"""1,000 guesses of a key each second: their answers wait, and clients with valid keys are answered. `make test-all` runs it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import uvloop

from loadtest.target import JSON, Target
from service.access.keys import create
from service.access.refused_keys import FREE_REFUSALS, WINDOW_SECONDS
from service.access.scopes import Scope
from tests.callers import Caller
from tests.long.others import BODY, ROWS_AT_ONCE, UsualClients, on_planted_device
from tests.serving import Server, check_unharmed

GUESSERS, DELAY_SECONDS, TIMER_SECONDS = 1_000, 1.0, 0.05
"""Each client guesses again after its answer, so a second has up to 1,000 guesses. Fewer clients than answers that may wait at a time."""
ROUNDS, PHASE_SECONDS = 2, 8.0


class Guessers:
    """Clients with wrong keys. waits: the seconds of each answer. others: statuses besides 401."""

    def __init__(self, server: Server, guessers: int) -> None:
        self._target = Target.of(server.address, "/infer")
        self._guessers = guessers
        self._guesses = itertools.count()
        self._ended = threading.Event()
        self.waits: list[float] = []
        self.others: list[int] = []
        self.seconds = 0.0
        self._began_at = self._ended_at = time.monotonic()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Guess during the context."""
        self._ended.clear()
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(uvloop.run, self._guess())
            try:
                yield
            finally:
                self._ended.set()
                running.result()
        self._ended_at = time.monotonic()
        self.seconds += self._ended_at - began

    @property
    def answered_at_once(self) -> int:
        """How many answers did not wait. A timer counts milliseconds from the beginning of a turn of the event loop: it may end early."""
        return sum(wait < DELAY_SECONDS - TIMER_SECONDS for wait in self.waits)

    @property
    def allowed_at_once(self) -> int:
        """How many answers need not wait: some of each window, and new windows begin between the guesses."""
        return FREE_REFUSALS * (1 + int((self._ended_at - self._began_at) / WINDOW_SECONDS))

    def __str__(self) -> str:
        return (
            f"{len(self.waits)} wrong keys, {len(self.waits) / self.seconds:.0f} a second, {self.answered_at_once} answered at once, the "
            f"last after {max(self.waits):.1f} s, other answers {self.others}"
        )

    async def _guess(self) -> None:
        await asyncio.gather(*(self._keep_guessing() for _ in range(self._guessers)))

    async def _keep_guessing(self) -> None:
        caller = await Caller.connect(self._target)
        while not self._ended.is_set():
            if not caller.connected:
                caller = await Caller.connect(self._target)
            began = time.monotonic()
            with suppress(ConnectionError):
                answer = await caller.ask(
                    self._target.request(BODY, JSON, f"Authorization: Bearer wrong-{next(self._guesses)}")
                )
                self.waits.append(time.monotonic() - began)
                if answer.status != 401:
                    self.others.append(answer.status)
        caller.hang_up()


@contextmanager
def guarded(root: Path) -> Iterator[tuple[Server, str]]:
    """Run a server with keys. Yields it and a valid key."""
    file = root / "keys.toml"
    key = create(file, "valid", [Scope.INFER, Scope.METRICS], "valid")
    flags = ("--keys", str(file))
    with on_planted_device("slow-device", root, *flags, max_batch_sequences=str(ROWS_AT_ONCE)) as server:
        server.client.headers["authorization"] = f"Bearer {key}"
        yield server, key


def test_answers_to_1_000_wrong_keys_a_second_wait(tmp_path: Path, show: Callable[[object], None]) -> None:
    """Clients with valid keys of the same address are all answered. Their times are printed: they grow with the load of the cores."""
    with guarded(tmp_path) as (server, key):
        usual = UsualClients.of(server, PHASE_SECONDS, f"Authorization: Bearer {key}")
        guessers = Guessers(server, GUESSERS)
        comparison = usual.compare(guessers.running, ROUNDS)
        show(f"{comparison}\n{guessers}")
        assert not comparison.failures and not guessers.others
        assert guessers.answered_at_once <= guessers.allowed_at_once
        check_unharmed(server)
