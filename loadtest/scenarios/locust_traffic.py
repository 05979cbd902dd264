"""Mixed traffic from locust, without its web page, on a running server or on a new one."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from loadtest import discovery, synthetic_models
from loadtest.servers import MODELS, named_or_new

SUMMARY = "mixed traffic from many users"
LOCUSTFILE = Path(__file__).parent.parent / "locustfile.py"
SERVER_LOG, REPORT = "server.log", "locust.html"
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
            served = discovery.served(url, discovery.access_of(options)).items()
            names = ", ".join(f"{name} {model['version']}" for name, model in served)
            print(f"{options.users} users for {options.seconds} s on {url}, seed {options.seed}; models: {names}\n", flush=True)
            status = subprocess.run(_command(options, url, models), stdin=subprocess.DEVNULL).returncode
    print(f"{options.out / REPORT}: locust's report with charts")
    return status


def _command(options: argparse.Namespace, url: str, models: Path) -> list[str]:
    flags: dict[str, object] = {
        "--locustfile": LOCUSTFILE,
        "--host": url,
        "--models": models,
        "--seed": options.seed,
        "--users": options.users,
        "--spawn-rate": min(options.users, USERS_A_SECOND),
        "--seconds": options.seconds,
        "--stop-timeout": f"{STOP_SECONDS}s",
        "--html": options.out / REPORT,
    }
    files = {"--key-file": options.key_file, "--ca": options.ca}
    flags |= {name: file for name, file in files.items() if file is not None}
    words = [f"{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "locust", "--headless", "--only-summary", "--loglevel=WARNING", *words]


def _count(word: str) -> int:
    if not (word.isdecimal() and int(word)):
        raise argparse.ArgumentTypeError(f"{word} is not a whole number above zero")
    return int(word)
