"""Parsers with a fault, which the fuzzer must find: behind four conditions, which random bytes meet once in 2^32 tries."""

from __future__ import annotations

import time
from collections.abc import Callable


def raises(data: bytes) -> None:
    if _reaches_the_fault(data):
        raise IndexError("planted")


def stalls(data: bytes) -> None:
    began = time.thread_time()
    while _reaches_the_fault(data) and time.thread_time() - began < 1.0:
        pass


def _reaches_the_fault(data: bytes) -> bool:
    return len(data) >= 4 and data[0] == 0x9C and data[1] == 0x03 and data[2] == 0xE7 and data[3] == 0x51


PLANTED: dict[str, Callable[[bytes], None]] = {"planted-exception": raises, "planted-stall": stalls}
