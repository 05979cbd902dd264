"""The shipped compose files on a real container engine: `docker compose` with its variables, as a user runs it. `make test-all` runs them.

All tests share a stack and run in this order; the last two end it. Files that COMPOSE_FILE names are added or replaced as compose does it.
The project has a separate name and separate ports, so that a stack that already runs is not touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from ast import literal_eval
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import yaml

from loadtest.servers import free_ports
from service.settings import Settings
from tests.deploy.shipped import DASHBOARD, DEPLOY, ROOT, RULES
from tests.serving import eventually

README = (ROOT / "README.md").read_text()
PORTS = {"service": ("SEQSERVE_PORT", "8000"), "prometheus": ("PROMETHEUS_PORT", "9090"), "grafana": ("GRAFANA_PORT", "3000")}


@dataclass
class Stack:
    """A compose project. `variables` is the environment of its commands."""

    variables: dict[str, str] = field(repr=False)
    clients: dict[str, httpx.Client] = field(default_factory=dict)

    @classmethod
    def made_up(cls) -> Stack:
        """Return a project with a unique name."""
        named = {"COMPOSE_PROJECT_NAME": f"seqserve-test-{os.getpid()}", "COMPOSE_PROFILES": "monitoring"}
        stack = cls({**os.environ, **named, "SEQSERVE_HOST": "127.0.0.1"})
        services = stack.config()["services"]
        for name, (variable, default) in PORTS.items():
            # Without published ports, as in the host's network, the port is the container's own: the variable's, if it is set.
            port = str(free_ports(1)[0]) if services[name].get("ports") else os.environ.get(variable, default)
            stack.variables[variable] = port
            stack.clients[name] = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False)
        # No test uses gRPC here: its port only has to be free.
        stack.variables.setdefault("SEQSERVE_GRPC_PORT", str(free_ports(1)[0]))
        return stack

    def docker(self, *arguments: str) -> str:
        """Run a command and return its output. Fails with its error output."""
        done = subprocess.run(["docker", *arguments], cwd=ROOT, env=self.variables, capture_output=True, text=True)
        assert done.returncode == 0, f"docker {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def compose(self, *arguments: str) -> str:
        return self.docker("compose", *arguments)

    def start(self, *services: str) -> None:
        """Build, start and wait for health. A failure shows the service's log."""
        try:
            self.compose("up", "--build", "--detach", "--wait", "--wait-timeout", "180", *services)
        except AssertionError as fault:
            raise AssertionError(f"{fault}\n{self.compose('logs', '--tail', '50')}") from None

    def inside(self, *command: str, user: str = "") -> str:
        """Run a command in the service's container and return its output."""
        return self.compose("exec", "--no-TTY", *(["--user", user] if user else []), "service", *command)

    def inside_python(self, statement: str) -> str:
        """Run a statement, which may use os and Path, in the service's container and return its output: the image has no shell."""
        return self.inside("python", "-Ic", f"import os; from pathlib import Path; {statement}")

    def config(self) -> dict[str, Any]:
        """Return the merged compose files."""
        read: dict[str, Any] = json.loads(self.compose("config", "--format", "json"))
        return read

    def reaches(self, service: str, path: str) -> bool:
        """Return whether the path returns 200."""
        try:
            return self.clients[service].get(path).status_code == 200
        except httpx.TransportError:
            return False

    def leftovers(self) -> str:
        """Return the containers, volumes and networks of this project."""
        mine = ("--quiet", "--filter", f"label=com.docker.compose.project={self.variables['COMPOSE_PROJECT_NAME']}")
        return "".join(self.docker(*kind, *mine) for kind in (("ps", "--all"), ("volume", "ls"), ("network", "ls")))

    def remove(self) -> None:
        self.compose("down", "--volumes")

    def close(self) -> None:
        self.remove()
        for client in self.clients.values():
            client.close()


def missing() -> str | None:
    """Return the missing requirement of a stack, and its remedy."""
    if shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        return "the docker command or `docker compose` is missing: install Docker with its compose plugin"
    engine = subprocess.run(["docker", "info"], capture_output=True, text=True)
    return (
        f"no container engine answers: start one, or name one with DOCKER_HOST\n{engine.stderr}" if engine.returncode else None
    )


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The service and Prometheus, built, started and healthy."""
    if reason := missing():
        pytest.exit(reason, returncode=1)
    made = Stack.made_up()
    try:
        made.start("service", "prometheus")
        eventually(lambda: made.reaches("prometheus", "/-/ready"), 30)
        yield made
    finally:
        made.close()


def ask(stack: Stack) -> list[str]:
    """Return the labels for the question of README."""
    asked = re.search(r"-d '(.+?)'", README)
    assert asked
    answer = stack.clients["service"].post("/infer", content=asked[1], headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    return [output["label"] for output in answer.json()["outputs"]]


STATES = "print(*[file.read_text() for file in Path('/proc').glob('[0-9]*/status')])"
"""Prints the states of all processes in the container."""
REFUSED_CALLS = ("unshare(0x10000000)", "ptrace(0, 0, 0, 0)", "setns(0, 0)")
PROGRAMS = "print(sorted({file.name for folder in ('bin', 'sbin', 'usr/local/bin') for file in Path('/', folder).iterdir()}))"


def test_container_has_no_privileges(stack: Stack) -> None:
    """Its root file system is read-only, and the kernel refuses what the service never does: namespaces, debuggers, other sockets."""
    states = stack.inside_python(STATES)
    assert {uid for uids in re.findall(r"^Uid:(.+)$", states, re.MULTILINE) for uid in uids.split()} == {"10001"}
    assert {int(bits, 16) for bits in re.findall(r"^Cap(?:Eff|Prm|Bnd):\s*(\w+)$", states, re.MULTILINE)} == {0}
    assert set(re.findall(r"^NoNewPrivs:\s*(\d)$", states, re.MULTILINE)) == {"1"}
    assert set(re.findall(r"^Seccomp:\s*(\d)$", states, re.MULTILINE)) == {"2"}
    for call in REFUSED_CALLS:
        refused = f"import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.{call}, ctypes.get_errno())"
        assert stack.inside_python(refused).split() == ["-1", "1"], call
    with pytest.raises(AssertionError, match="Operation not permitted"):
        stack.inside_python("import socket; socket.socket(40)")
    with pytest.raises(AssertionError, match="Read-only file system"):
        stack.inside("python", "-Ic", "open('/probe', 'w')", user="0")
    stack.inside("python", "-Ic", "open('/tmp/probe', 'w')", user="0")


def test_image_has_no_program_but_python(stack: Stack) -> None:
    """Neither a shell nor a package manager nor a compiler."""
    assert set(literal_eval(stack.inside_python(PROGRAMS))) == {"ldconfig", "python", "python3", "python3.11"}
    for program in ("sh", "pip", "apt-get", "gcc"):
        with pytest.raises(AssertionError, match="executable file not found"):
            stack.inside(program)


def test_it_answers_and_prometheus_scrapes_it(stack: Stack) -> None:
    """The answer is that of the README, and every rule is evaluated."""
    shown = re.search(r"```json\n(.+?)```", README, re.DOTALL)
    assert shown
    assert ask(stack) == [output["label"] for output in json.loads(shown[1])["outputs"]]
    prometheus = stack.clients["prometheus"]

    def answered() -> bool:
        reply = prometheus.get("/api/v1/query", params={"query": "sum(seqserve_requests_total) > 0"})
        return bool(reply.json()["data"]["result"])

    def rules() -> dict[str, str]:
        groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    groups = yaml.safe_load((DEPLOY / RULES).read_text())["groups"]
    shipped = {rule.get("alert") or rule["record"]: "ok" for group in groups for rule in group["rules"]}
    eventually(answered)
    eventually(lambda: rules() == shipped)


def test_grafana_shows_the_dashboard_without_login(stack: Stack) -> None:
    image = stack.config()["services"]["grafana"]["image"]
    commands = [["docker", "image", "inspect", image], ["docker", "pull", image]]
    if all(subprocess.run(command, env=stack.variables, capture_output=True).returncode for command in commands):
        pytest.skip(f"{image} is not on this engine and cannot be pulled, so Grafana is untested")
    stack.start("grafana")
    eventually(lambda: stack.reaches("grafana", "/api/health"), 60)
    shipped = json.loads((DEPLOY / DASHBOARD).read_text())
    assert stack.clients["grafana"].get("/api/dashboards/home").json()["dashboard"]["title"] == shipped["title"]


def test_killed_engine_restarts_in_the_container(stack: Stack) -> None:
    listed, before = "print({file.parent.name: file.read_text() for file in Path('/proc').glob('[0-9]*/cmdline')})", ask(stack)

    def engine() -> str:
        """Return the process id of the engine in the container, or an empty text."""
        commands = literal_eval(stack.inside_python(listed)).items()
        return "".join(pid for pid, command in commands if command.endswith("\0service.engine\0"))

    pid = engine()
    stack.inside_python(f"os.kill({pid}, 9)")
    eventually(lambda: engine() not in ("", pid), 10)
    eventually(lambda: stack.reaches("service", "/readyz"), 30)
    assert ask(stack) == before
    assert "zombie" not in stack.inside_python(STATES)


def test_container_stops_with_status_0_in_time(stack: Stack) -> None:
    container = stack.compose("ps", "--quiet", "service").strip()
    limits, started = Settings(), time.monotonic()
    stack.compose("stop", "service")
    took = time.monotonic() - started
    assert stack.docker("inspect", "--format", "{{.State.ExitCode}}", container).strip() == "0"
    assert limits.lame_duck_seconds <= took < limits.lame_duck_seconds + limits.drain_seconds


def test_stack_leaves_nothing_behind(stack: Stack) -> None:
    assert stack.leftovers()
    stack.remove()
    assert not stack.leftovers()
