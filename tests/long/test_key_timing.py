"""The time of a key's check tells nothing about the key: Welch's t test on many checks, as dudect does it.

Two classes of wrong keys are checked in random order. The slowest checks, which interrupts and other processes have delayed, are left
out. The statistic t is the difference of the mean times in units of its standard error. It grows with the number of checks if there is
a difference, and stays near 0 otherwise.
"""

from __future__ import annotations

import gc
import random
import secrets
import statistics
import string
import time
from collections.abc import Callable
from contextlib import suppress
from math import sqrt
from pathlib import Path

import pytest

from service.access import keys
from service.access.policy import AccessPolicy
from service.access.scopes import Scope
from service.errors import Unauthorized
from service.settings import Settings

CHECKS = 60_000
"""Checks of one measurement, in both classes together. They find a difference of 2 ns on a quiet machine, of 50 ns on a busy machine."""
KEPT = 0.9
"""Share of the checks that count: the fastest checks of both classes together."""
SUSPICIOUS = 10.0
"""Absolute value of t above which a difference is certain."""
LOOKUP_NS = 50.0
"""An id that is known may take this much longer or shorter: the lookup in a dictionary takes 2 to 12 ns more for some ids, depending on
the seed of their hashes. An id is no secret."""
ATTEMPTS = 6
"""A busy machine may disturb a measurement. A real difference shows in each."""
CHARACTERS = string.ascii_letters + string.digits
Wrong = Callable[[], str]
"""Returns a new wrong key of one class."""


def other_than(character: str) -> str:
    return random.choice(CHARACTERS.replace(character, ""))


def wrong_keys(token: str) -> dict[str, Wrong]:
    id, _, secret = token.partition(".")
    return {
        "unknown id": lambda: f"{secrets.token_hex(len(id) // 2)}.{secrets.token_urlsafe(keys.SECRET_BYTES)}",
        "wrong secret": lambda: f"{id}.{secrets.token_urlsafe(keys.SECRET_BYTES)}",
        "wrong first byte": lambda: f"{id}.{other_than(secret[0])}{secret[1:]}",
        "wrong last byte": lambda: f"{id}.{secret[:-1]}{other_than(secret[-1])}",
    }


def t_of(policy: AccessPolicy, first: Wrong, second: Wrong, margin_ns: float) -> float:
    """Check keys of two classes in random order and return t of the excess of their difference over the margin."""
    classes = [number % 2 for number in range(CHECKS)]
    random.shuffle(classes)
    headers = [f"Bearer {(second if chosen else first)()}" for chosen in classes]
    times = [0] * CHECKS
    clock, identify = time.perf_counter_ns, policy.identify
    gc.collect()
    gc.disable()
    try:
        for number, header in enumerate(headers):
            began = clock()
            with suppress(Unauthorized):
                identify("localhost", None, header)
            times[number] = clock() - began
    finally:
        gc.enable()
    limit = sorted(times)[int(KEPT * CHECKS)]
    kept = [(took, chosen) for took, chosen in zip(times, classes, strict=True) if took <= limit]
    first_times, second_times = ([took for took, chosen in kept if chosen == place] for place in (0, 1))
    variances = (statistics.variance(times) / len(times) for times in (first_times, second_times))
    excess = abs(statistics.fmean(first_times) - statistics.fmean(second_times)) - margin_ns
    return max(0.0, excess) / sqrt(sum(variances))


@pytest.mark.parametrize(("first", "second"), [("unknown id", "wrong secret"), ("wrong first byte", "wrong last byte")])
def test_time_of_a_check_does_not_tell_what_is_wrong(first: str, second: str, tmp_path: Path) -> None:
    tokens = [keys.create(tmp_path / "keys.toml", f"key-{number}", [Scope.INFER], "tenant") for number in range(8)]
    policy, wrong = AccessPolicy(Settings(keys=str(tmp_path / "keys.toml"))), wrong_keys(tokens[3])
    margin = LOOKUP_NS if first == "unknown id" else 0.0
    assert any(t_of(policy, wrong[first], wrong[second], margin) <= SUSPICIOUS for _ in range(ATTEMPTS))
