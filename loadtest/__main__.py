"""`python -m loadtest`: run the load test without locust's web page, on a running server or on a new one."""

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

from loadtest import chart, discovery, report, synthetic_models
from loadtest.discovery import NoServer
from loadtest.request_log import RequestLogReader, RequestTotals
from loadtest.servers import ROOT, running, seqserve

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
SERVER_LOG, CHART, FIGURES, HTML = "server.log", "loadtest.png", "figures.csv", "locust.html"
PROGRESS_SECONDS = 1.0
USERS_A_SECOND = 100
"""Maximum spawn rate: locust warns above it."""
STOP_SECONDS = 30
"""Time for the requests that are open at the end."""


@dataclass(frozen=True, slots=True)
class LocustRun:
    """Parameters of a load test. models: folder with the tokenizers of text models; out: output folder."""

    url: str
    models: Path
    users: int
    seconds: int
    seed: int
    out: Path

    @property
    def request_log(self) -> Path:
        return self.out / "requests.csv"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when no request failed, 1 when a request failed, 2 without a server or without a model to load."""
    options = _parser().parse_args(arguments)
    log = options.out / SERVER_LOG
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with _server(options.url, options.models, options.serve, log) as (url, models):
            return run(LocustRun(url, models, options.users, options.seconds, options.seed, options.out))
    except NoServer as error:
        print(f"loadtest: {error}, or leave it out to start a new server", file=sys.stderr)
    except RuntimeError as error:
        print(f"loadtest: {error}, {log}", file=sys.stderr)
    return 2


def run(plan: LocustRun) -> int:
    """Run the load test, print its figures and write them to the output folder."""
    served = ", ".join(f"{name} {model['version']}" for name, model in discovery.served(plan.url).items())
    load = f"{plan.users} users for {plan.seconds} s"
    print(f"{load} on {plan.url}, seed {plan.seed}; models: {served}\n", flush=True)
    totals = RequestTotals()
    status = _run_locust(plan, totals)
    if not totals.requests:
        print("loadtest: no request was sent: see locust's messages above", file=sys.stderr)
        return status or 2
    subtitle = f"{served}\n{_summary(totals)}"
    chart.draw(plan.out / CHART, totals.requests, plan.seconds, f"seqserve under load: {load}", subtitle)
    lines = list(_table(totals))
    with (plan.out / FIGURES).open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
    print("\n".join(["", *report.table(lines), *_failures(totals), ""]))
    print(
        f"{plan.out}: {CHART}, {FIGURES}, {plan.request_log.name} (every request), {HTML} (locust's report, with rounded times)"
    )
    return 1 if totals.total.failed else status


def _run_locust(plan: LocustRun, totals: RequestTotals) -> int:
    """Run locust and print progress every second. Returns its exit status. An interrupt from the keyboard ends locust only."""
    plan.request_log.unlink(missing_ok=True)
    reader = RequestLogReader(plan.request_log)
    with subprocess.Popen(_command(plan), stdin=subprocess.DEVNULL) as locust:
        while locust.returncode is None:
            try:
                locust.wait(PROGRESS_SECONDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                totals.add(reader.read())
                if totals.requests:
                    print(report.progress(f"{plan.users} users", totals.total, plan.seconds), file=sys.stderr, flush=True)
    totals.add(reader.read())
    return locust.returncode


def _command(plan: LocustRun) -> list[str]:
    options: dict[str, object] = {
        "--locustfile": LOCUSTFILE,
        "--host": plan.url,
        "--models": plan.models,
        "--seed": plan.seed,
        "--request-log": plan.request_log,
        "--users": plan.users,
        "--spawn-rate": min(plan.users, USERS_A_SECOND),
        "--run-time": f"{plan.seconds}s",
        "--stop-timeout": f"{STOP_SECONDS}s",
        "--html": plan.out / HTML,
    }
    words = [f"{name}={value}" for name, value in options.items()]
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


@contextmanager
def _server(url: str | None, models: Path, flags: Sequence[str], log: Path) -> Iterator[tuple[str, Path]]:
    """Yield the URL of a server and its models folder. A new server has `models` and the synthetic model `sensors`."""
    if url:
        yield url.rstrip("/"), models
        return
    with TemporaryDirectory() as scratch:
        folder = synthetic_models.with_sensors(models, Path(scratch))
        with running(*seqserve("--models", str(folder), *flags), log=log) as server:
            yield server.url, folder


def _count(word: str) -> int:
    if not (word.isdecimal() and int(word)):
        raise argparse.ArgumentTypeError(f"{word} is not a whole number above zero")
    return int(word)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description="Load test with locust.")
    parser.add_argument("--url", help="a running server (default: start one)")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="models folder (default: the embedded models)")
    parser.add_argument("--users", type=_count, default=32, help="concurrent users (default: %(default)s)")
    parser.add_argument("--seconds", type=_count, default=30, help="duration (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traffic (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/loadtest"), help="output folder (default: %(default)s)")
    parser.add_argument("serve", nargs="*", metavar="FLAG", help="after --: flags for the server that is started")
    return parser


if __name__ == "__main__":
    sys.exit(main())
