"""Mixed traffic from locust, without its web page, on a running server or on a new one."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from loadtest import discovery
from loadtest.servers import MODELS, named_or_new

SUMMARY = "mixed traffic from many users"
LOCUSTFILE = Path(__file__).parent.parent / "locustfile.py"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a running server, instead of a new one")
    discovery.add_access_options(parser)
    parser.add_argument("--models", type=Path, default=MODELS, help="models folder")
    parser.add_argument("--users", type="count", default=32, help="concurrent users")
    parser.add_argument("--seconds", type="count", default=30, help="duration from when all users have started")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traffic")
    parser.add_argument("serve", nargs="*", metavar="FLAG", help="after --: flags for the server that is started")


def run(options: argparse.Namespace) -> int:
    """Load a running server or a new one. Returns 1 when a request failed."""
    flags = ("--models", str(options.models), *options.serve)
    with named_or_new(options.url, None, options.out / "server.log", *flags) as (url, _):
        served = discovery.served(url, discovery.access_of(options)).items()
        names = ", ".join(f"{name} {model['version']}" for name, model in served)
        print(f"{options.users} users for {options.seconds} s on {url}, seed {options.seed}; models: {names}\n", flush=True)
        status = subprocess.run(_command(options, url), stdin=subprocess.DEVNULL).returncode
    print(f"{options.out / 'locust.html'}: locust's report with charts")
    return status


def _command(options: argparse.Namespace, url: str) -> list[str]:
    flags: dict[str, object] = {
        "--locustfile": LOCUSTFILE,
        "--host": url,
        "--models": options.models,
        "--seed": options.seed,
        "--users": options.users,
        "--spawn-rate": 100,  # locust warns above it
        "--seconds": options.seconds,
        "--stop-timeout": "30s",  # for the requests and sessions that are open at the end
        "--html": options.out / "locust.html",
        "--key-file": options.key_file,
        "--ca": options.ca,
    }
    words = [f"{name}={value}" for name, value in flags.items() if value is not None]
    return [sys.executable, "-m", "locust", "--headless", "--only-summary", "--loglevel=WARNING", *words]
