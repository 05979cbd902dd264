"""Run the shipped compose files on a real container engine, as a user does: with `docker compose` and its variables.

Files that COMPOSE_FILE names are added or replaced as compose does it. The project has a separate name and separate ports, so that
a stack that already runs is not touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loadtest.servers import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
PORTS = {"service": ("SEQSERVE_PORT", "8000"), "prometheus": ("PROMETHEUS_PORT", "9090"), "grafana": ("GRAFANA_PORT", "3000")}


@dataclass
class Stack:
    """A compose project. `variables` is the environment of its commands."""

    variables: dict[str, str] = field(repr=False)
    clients: dict[str, httpx.Client] = field(default_factory=dict)

    @classmethod
    def made_up(cls) -> Stack:
        """Return a project with a unique name."""
        stack = cls({**os.environ, "COMPOSE_PROJECT_NAME": f"seqserve-test-{os.getpid()}", "SEQSERVE_HOST": "127.0.0.1"})
        services = stack.config()["services"]
        for name, (variable, default) in PORTS.items():
            # Without published ports, as in the host's network, the port is the container's own: the variable's, if it is set.
            port = str(free_port()) if services[name].get("ports") else os.environ.get(variable, default)
            stack.variables[variable] = port
            stack.clients[name] = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False)
        # No test uses gRPC here: its port only has to be free.
        stack.variables.setdefault("SEQSERVE_GRPC_PORT", str(free_port()))
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
