"""`python -m loadtest`: the load test without a web page, on the server that is named or on one of its own."""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from loadtest import chart, discovery, report, sensors
from loadtest.discovery import NoServer
from loadtest.journal import Reader, Tally
from loadtest.servers import ROOT, running, seqserve

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
SERVER_LOG = "server.log"
PROGRESS_SECONDS = 1.0
USERS_A_SECOND = 100
"""So many start at most: locust warns of more."""
STOP_SECONDS = 30
"""Requests that are open at the end may take this much longer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who asks for how long, and where what came of it goes; `models` has the words of text models."""

    url: str
    models: Path
    users: int
    seconds: int
    seed: int
    out: Path

    @property
    def journal(self) -> Path:
        return self.out / "requests.csv"

    @property
    def picture(self) -> Path:
        return self.out / "loadtest.png"

    @property
    def page(self) -> Path:
        return self.out / "locust.html"

    @property
    def figures(self) -> Path:
        return self.out / "figures.csv"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when no request failed, 1 when one did, 2 when there was nobody to ask or nothing to ask for."""
    said = _parser().parse_args(arguments)
    try:
        said.out.mkdir(parents=True, exist_ok=True)
        with _server(said.url, said.models, said.serve, said.out / SERVER_LOG) as (url, models):
            return run(Plan(url, models, said.users, said.seconds, said.seed, said.out))
    except NoServer as fault:
        print(f"loadtest: {fault}, or leave it out for a server of the test's own", file=sys.stderr)
    except RuntimeError as fault:
        print(f"loadtest: {fault}; it is {said.out / SERVER_LOG}", file=sys.stderr)
    return 2


def run(plan: Plan) -> int:
    served = ", ".join(f"{name} {model['version']}" for name, model in discovery.served(plan.url).items())
    load = f"{plan.users} users for {plan.seconds} s"
    print(f"{load} on {plan.url}, seed {plan.seed}; served there: {served}\n", flush=True)
    tally = Tally()
    status = _load(plan, tally)
    if not tally.entries:
        print("loadtest: nothing was asked: locust says above why", file=sys.stderr)
        return status or 2
    totals = _summary(tally)
    chart.draw(plan.picture, tally.entries, plan.seconds, f"seqserve under load: {load}", f"{served}\n{totals}")
    rows = list(_table(tally))
    with plan.figures.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    print("\n".join(["", *report.table(rows), *_failures(tally), ""]))
    print(f"{plan.picture}: the chart; {plan.page}: locust's report, which rounds times to three digits")
    print(f"{plan.figures}: the figures above; {plan.journal}: every request, from which they are worked out exactly")
    return 1 if tally.total.failed else status


def _load(plan: Plan, tally: Tally) -> int:
    """Run locust, and say every second how far it has come; returns its exit status. An interrupt ends it, and no more."""
    plan.journal.unlink(missing_ok=True)
    reader = Reader(plan.journal)
    with subprocess.Popen(_locust(plan), stdin=subprocess.DEVNULL) as locust:
        while locust.returncode is None:
            try:
                locust.wait(PROGRESS_SECONDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                tally.add(reader.news())
                if tally.entries:
                    print(report.progress(f"{plan.users} users", tally.total, plan.seconds), file=sys.stderr, flush=True)
    tally.add(reader.news())
    return locust.returncode


def _locust(plan: Plan) -> list[str]:
    options: dict[str, object] = {
        "--locustfile": LOCUSTFILE,
        "--host": plan.url,
        "--models": plan.models,
        "--seed": plan.seed,
        "--journal": plan.journal,
        "--users": plan.users,
        "--spawn-rate": min(plan.users, USERS_A_SECOND),
        "--run-time": f"{plan.seconds}s",
        "--stop-timeout": f"{STOP_SECONDS}s",
        "--html": plan.page,
    }
    words = [f"{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "locust", "--headless", "--only-summary", "--skip-log-setup", *words]


def _table(tally: Tally) -> Iterator[list[str]]:
    """A line for each kind of caller, and one for all."""
    yield ["kind", "answers", "answers/s", *(f"{name} ms" for name in report.QUANTILES), "failed", "hung up"]
    for kind, figures in [*sorted(tally.kinds.items()), ("total", tally.total)]:
        times = ("-" if math.isnan(value) else f"{value:.2f}" for value in report.milliseconds(figures).values())
        hung_up = tally.hung_up[kind] if kind in tally.kinds else tally.hung_up.total()
        yield [kind, str(len(figures.answers)), f"{figures.rate:.0f}", *times, str(figures.failed), str(hung_up)]


def _failures(tally: Tally) -> Iterator[str]:
    for kind, figures in sorted(tally.kinds.items()):
        for reason, count in figures.failures.most_common():
            yield f"{kind}: {count} failed with {reason}"


def _summary(tally: Tally) -> str:
    times = ", ".join(f"{name} {value:.1f} ms" for name, value in report.milliseconds(tally.total).items())
    return f"{tally.total.rate:.0f} answers a second, {times}, {tally.total.failed} failed, {tally.hung_up.total()} hung up"


@contextmanager
def _server(url: str | None, models: Path, flags: Sequence[str], log: Path) -> Iterator[tuple[str, Path]]:
    """Where the server is, and the folder of its models: a new one serves `models` and the sensors."""
    if url:
        yield url.rstrip("/"), models
        return
    with TemporaryDirectory() as scratch:
        folder = sensors.beside(models, Path(scratch))
        with running(*seqserve("--models", str(folder), *flags), log=log) as server:
            yield server.url, folder


def _count(word: str) -> int:
    if not (word.isdecimal() and int(word)):
        raise argparse.ArgumentTypeError(f"{word} is no whole number above zero")
    return int(word)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description="A load test by locust.")
    parser.add_argument("--url", help="a running server; one is started unless given")
    parser.add_argument(
        "--models", type=Path, default=ROOT / "models", help="folder of its models, the embedded ones unless given"
    )
    parser.add_argument("--users", type=_count, default=32, help="callers at once, %(default)s unless given")
    parser.add_argument("--seconds", type=_count, default=30, help="%(default)s unless given")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic, %(default)s unless given")
    parser.add_argument("--out", type=Path, default=Path("build/loadtest"), help="folder of what it writes, %(default)s")
    parser.add_argument("serve", nargs="*", metavar="FLAG", help="after --: more flags for the server that is started")
    return parser


if __name__ == "__main__":
    sys.exit(main())
