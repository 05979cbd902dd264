"""Measure whether the memory, the descriptors and the threads of a server's processes grow with the load."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from tests.serving import Server

LIMIT_BYTES = 10.0
"""Bytes per request: 1 MiB in 100,000 requests. The whole interval of confidence of a process that does not grow lies below it. The memory
pools of a frontend grow in small steps, by 1.8 MiB in all, until some 160,000 requests, and by nothing from there to 500,000."""
SETTLED_SECONDS = 0.5
CONFIDENCE = 0.99
MIN_SAMPLES = 4
"""Samples of one process before its slope means anything."""


class Sample(NamedTuple):
    """The resources of a process after `sent` requests."""

    pid: int
    sent: int
    bytes: int
    descriptors: int
    threads: int


def sample(server: Server, sent: int) -> dict[str, Sample]:
    """Return a sample of each process."""
    return {name: sample_of(pid, sent) for name, pid in processes(server).items()}


def sample_of(pid: int, sent: int) -> Sample:
    descriptors, threads = (len(list(Path(f"/proc/{pid}", folder).iterdir())) for folder in ("fd", "task"))
    return Sample(pid, sent, resident_bytes(pid), descriptors, threads)


class Slope(NamedTuple):
    """A slope per request with its interval of confidence."""

    low: float
    middle: float
    high: float


def slope(points: Iterable[Sequence[tuple[int, float]]]) -> Slope | None:
    """Return Sen's slope over several series, which are compared only within themselves: Hirsch and Slack's seasonal form.

    points: series of (requests, value). The interval is that of Gilbert (1987), from the variance of Kendall's statistic. None with too few
    points. A single step of an allocator lies between fewer than half of the pairs, so it does not change the median.
    """
    slopes, variance = list[float](), 0.0
    for series in points:
        count = len(series)
        if count < MIN_SAMPLES:
            continue
        pairs = [(one, other) for at, one in enumerate(series) for other in series[at + 1 :] if other[0] > one[0]]
        slopes += [(other[1] - one[1]) / (other[0] - one[0]) for one, other in pairs]
        ties = Counter(value for _, value in series).values()
        variance += (count * (count - 1) * (2 * count + 5) - sum(tie * (tie - 1) * (2 * tie + 5) for tie in ties)) / 18
    if not slopes:
        return None
    slopes.sort()
    reach = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(variance)
    low = slopes[max(0, math.floor((len(slopes) - reach) / 2))]
    return Slope(low, slopes[len(slopes) // 2], slopes[min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))])


def growth(samples: Sequence[dict[str, Sample]]) -> dict[str, Slope]:
    """Return the slope of each quantity of each role, such as "engine bytes". Processes may be replaced between samples.

    The first sample of a process is left out: its memory pools fill before the second.
    """
    series: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for one in samples:
        for name, each in one.items():
            series[name.partition("-")[0]][each.pid].append(each)
    found = {}
    for role, by_pid in series.items():
        for quantity in ("bytes", "descriptors", "threads"):
            lines = [[(one.sent, float(getattr(one, quantity))) for one in each[1:]] for each in by_pid.values()]
            if (there := slope(lines)) is not None:
                found[f"{role} {quantity}"] = there
    return found


def growing(slopes: Mapping[str, Slope]) -> set[str]:
    """Return the processes whose memory grows: the whole interval of confidence is above the limit."""
    return {name for name, each in slopes.items() if name.endswith("bytes") and each.low > LIMIT_BYTES}


def processes(server: Server) -> dict[str, int]:
    """Return process ids by process name."""
    return {"supervisor": server.process.pid} | {event["child"]: event["pid"] for event in server.events("started")}


def resident_bytes(pid: int | str) -> int:
    """Return the resident bytes of a process, or of "self". They are counted page by page: statm may be wrong by some MiB, and by more on
    more cores."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def settled_open_files(server: Server) -> dict[str, int]:
    """Return `open_files` once it has not changed for a while: connections that were closed are then gone."""
    before = open_files(server)
    while True:
        time.sleep(SETTLED_SECONDS)
        now = open_files(server)
        if now == before:
            return now
        before = now


def open_files(server: Server) -> dict[str, int]:
    """Return the number of open descriptors of each process, sockets included."""
    return {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in processes(server).items()}
