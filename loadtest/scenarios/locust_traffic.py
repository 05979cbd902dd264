"""Mixed traffic from locust, without its web page, on a running server or on a new one."""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from loadtest import chart, discovery, report, synthetic_models
from loadtest.request_log import RequestLogReader, RequestTotals
from loadtest.servers import MODELS, named_or_new

SUMMARY = "mixed traffic from many users"
LOCUSTFILE = Path(__file__).parent.parent / "locustfile.py"
SERVER_LOG, CHART, FIGURES, HTML = "server.log", "loadtest.png", "figures.csv", "locust.html"
REQUESTS = "requests.csv"
PROGRESS_SECONDS = 1.0
USERS_A_SECOND = 100
"""Maximum spawn rate: locust warns above it."""
STOP_SECONDS = 30
"""Time for the requests that are open at the end."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a running server, instead of a new one")
    discovery.add_access_options(parser)
    parser.add_argument("--models", type=Path, default=MODELS, help="models folder")
    parser.add_argument("--users", type=_count, default=32, help="concurrent users")
    parser.add_argument("--seconds", type=_count, default=30, help="duration from when all users have started")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traffic")
    parser.add_argument("serve", nargs="*", metavar="FLAG", help="after --: flags for the server that is started")


def run(options: argparse.Namespace) -> int:
    """Load a running server, or a new server that also has the synthetic model `sensors`. Returns 1 when a request failed."""
    with TemporaryDirectory() as scratch:
        models = options.models if options.url else synthetic_models.with_sensors(options.models, Path(scratch))
        flags = ("--models", str(models), *options.serve)
        with named_or_new(options.url, None, options.out / SERVER_LOG, *flags) as (url, _):
            return _load(options, url, models)


def _load(options: argparse.Namespace, url: str, models: Path) -> int:
    """Run the load test, print its figures and write them to the output folder."""
    served = ", ".join(
        f"{name} {model['version']}" for name, model in discovery.served(url, discovery.access_of(options)).items()
    )
    users = f"{options.users} users for {options.seconds} s"
    print(f"{users} on {url}, seed {options.seed}; models: {served}\n", flush=True)
    totals = RequestTotals()
    status = _run_locust(options, _command(options, url, models), totals)
    if not totals.requests:
        print("loadtest: no request was sent: see locust's messages above", file=sys.stderr)
        return status or 2
    subtitle = f"{served}\n{_summary(totals)}"
    chart.draw(options.out / CHART, totals.requests, _duration(options), f"seqserve under load: {users}", subtitle)
    lines = list(_table(totals))
    with (options.out / FIGURES).open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
    print("\n".join(["", report.table(lines), *_failures(totals), ""]))
    print(f"{options.out}: {CHART}, {FIGURES}, {REQUESTS} (every request), {HTML} (locust's report, with rounded times)")
    return 1 if totals.total.failed else status


def _run_locust(options: argparse.Namespace, command: Sequence[str], totals: RequestTotals) -> int:
    """Run locust and print progress every second. Returns its exit status. An interrupt from the keyboard ends locust only."""
    log = options.out / REQUESTS
    log.unlink(missing_ok=True)
    reader = RequestLogReader(log)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as locust:
        while locust.returncode is None:
            try:
                locust.wait(PROGRESS_SECONDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                totals.add(reader.read())
                if totals.requests:
                    line = report.progress(f"{options.users} users", totals.total, _duration(options))
                    print(line, file=sys.stderr, flush=True)
    totals.add(reader.read())
    return locust.returncode


def _duration(options: argparse.Namespace) -> float:
    """Return the seconds from the start of the first users to the end."""
    return float(options.seconds + (options.users - 1) // USERS_A_SECOND)


def _command(options: argparse.Namespace, url: str, models: Path) -> list[str]:
    flags: dict[str, object] = {
        "--locustfile": LOCUSTFILE,
        "--host": url,
        "--models": models,
        "--seed": options.seed,
        "--request-log": options.out / REQUESTS,
        "--users": options.users,
        "--spawn-rate": min(options.users, USERS_A_SECOND),
        "--seconds": options.seconds,
        "--stop-timeout": f"{STOP_SECONDS}s",
        "--html": options.out / HTML,
    }
    files = {"--key-file": options.key_file, "--ca": options.ca}
    flags |= {name: file for name, file in files.items() if file is not None}
    words = [f"{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "locust", "--headless", "--only-summary", "--skip-log-setup", *words]


def _table(totals: RequestTotals) -> Iterator[list[str]]:
    """Yield one line for each kind of user, and the total."""
    yield ["kind", "answers", "answers/s", *(f"{name} ms" for name in report.QUANTILES), "failed", "hung up"]
    for kind, figures in [*sorted(totals.kinds.items()), ("total", totals.total)]:
        times = ("-" if math.isnan(value) else f"{value:.2f}" for value in report.milliseconds(figures).values())
        hung_up = totals.hung_up[kind] if kind in totals.kinds else totals.hung_up.total()
        yield [kind, str(len(figures.answers)), f"{figures.rate:.0f}", *times, str(figures.failed), str(hung_up)]


def _failures(totals: RequestTotals) -> Iterator[str]:
    for kind, figures in sorted(totals.kinds.items()):
        for reason, count in figures.failures.most_common():
            yield f"{kind}: {count} failed with {reason}"


def _summary(totals: RequestTotals) -> str:
    times = ", ".join(f"{name} {value:.1f} ms" for name, value in report.milliseconds(totals.total).items())
    return f"{totals.total.rate:.0f} answers a second, {times}, {totals.total.failed} failed, {totals.hung_up.total()} hung up"


def _count(word: str) -> int:
    if not (word.isdecimal() and int(word)):
        raise argparse.ArgumentTypeError(f"{word} is not a whole number above zero")
    return int(word)
