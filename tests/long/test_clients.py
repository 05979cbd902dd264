"""The clients in examples/clients, each run against a service as its README says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from service.access.keys import create
from service.access.scopes import Scope
from service.settings import CLIENT_KEY
from tests.serving import Server, serving

ROOT = Path(__file__).resolve().parent.parent.parent
CLIENTS = ROOT / "examples" / "clients"
PYTHON = ("http_client.py", "websocket_client.py", "triton_http.py", "triton_grpc.py")
PROGRAMS = (*PYTHON, "client.sh", "Client.java", "client.go")
RUN = {".py": [sys.executable], ".sh": ["sh"], ".java": ["java"], ".go": ["go", "run"]}
NEEDS = {"client.sh": "curl", "Client.java": "javac", "client.go": "go"}
FORECASTS = ((0.038, -0.393, 0.164), (0.443, -0.433, 0.380), (0.003, -0.345, 0.111))
"""The answers of sensor-forecast after one, two and three rows."""


class Guarded(NamedTuple):
    """A service with a key."""

    server: Server
    key: str

    def address(self, program: str) -> str:
        """Return the address as a program takes it."""
        if program == "triton_grpc.py":
            return self.server.grpc
        return self.server.address.removeprefix("http://") if program == "triton_http.py" else self.server.address


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    scratch = tmp_path_factory.mktemp("clients")
    key = create(scratch / "keys.toml", "example", [Scope.INFER, Scope.SESSION], "example")
    with serving(ROOT / "models", scratch, "--keys", str(scratch / "keys.toml")) as server:
        yield Guarded(server, key)


def run(program: str, address: str, key: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    if program in NEEDS and shutil.which(NEEDS[program]) is None:
        pytest.skip(f"{NEEDS[program]} is missing: run make programs PROGRAMS=toolchains")
    command = [*RUN[Path(program).suffix], program, address]
    environment = os.environ | {CLIENT_KEY: key, "GOCACHE": str(scratch / "go"), "HOME": str(scratch)}
    return subprocess.run(command, cwd=CLIENTS, env=environment, capture_output=True, text=True, timeout=300, check=False)


def forecasts(printed: str) -> list[tuple[float, ...]]:
    """Return the forecasts that a program printed, in groups of three numbers."""
    lines = re.findall(r'steps: (.+)|"value":\[(.+?)\]', printed)
    return [tuple(map(float, re.findall(r"-?\d+\.\d+", "".join(line)))) for line in lines]


@pytest.mark.parametrize("program", PROGRAMS)
def test_client_prints_answers_forecasts_and_an_error(program: str, guarded: Guarded, tmp_path: Path) -> None:
    done = run(program, guarded.address(program), guarded.key, tmp_path)
    assert done.returncode == 0, done.stderr
    if program != "websocket_client.py":
        assert re.search(r'^NUM$|"label":"NUM"', done.stdout, re.MULTILINE)
    assert forecasts(done.stdout)[-3:] == [pytest.approx(values, abs=0.001) for values in FORECASTS]
    assert "unknown model nobody" in done.stdout + done.stderr
    assert guarded.key not in done.stdout + done.stderr
