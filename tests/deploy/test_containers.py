"""The container files, without a container engine. `make test-all` builds and runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from service.settings import Settings, load

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE = "docker-compose.yml"
GPU = "docker-compose.gpu.yml"


def instructions(name: str) -> list[str]:
    """Return the arguments of every instruction of this kind in the Dockerfile, with continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return re.findall(rf"^{name} (.+)$", whole, re.MULTILINE)


def copied() -> set[str]:
    """Return the paths that the image build copies from the repository."""
    taken = [line.split() for line in instructions("COPY") if not line.startswith("--from")]
    return {source for *sources, _ in taken for source in sources}


class ComposeLoader(yaml.SafeLoader):
    """Reads YAML with the tag of compose for a list that replaces the list in the first file."""


ComposeLoader.add_constructor("!override", lambda loader, node: loader.construct_sequence(cast(yaml.SequenceNode, node)))


def services(file: str) -> dict[str, dict[str, Any]]:
    read: dict[str, dict[str, Any]] = yaml.load((ROOT / file).read_text(), ComposeLoader)["services"]
    return read


@contextmanager
def answering(status: int) -> Iterator[str]:
    """Run a server that returns `status` for /readyz and 404 otherwise. Yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield str(server.server_port)
        server.shutdown()


def health(port: str, **variables: str) -> int:
    """Return the exit status of the image's health check."""
    _, *command = json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2])
    environment = {**os.environ, "SEQSERVE_PORT": port, **variables}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, timeout=30).returncode


def test_hadolint_passes() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_build_context_has_only_what_is_copied() -> None:
    everything, *patterns = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    assert everything == "*"
    assert {pattern[1:] for pattern in patterns if pattern.startswith("!")} == copied()
    assert all((ROOT / source).exists() for source in copied())


def test_image_has_a_numeric_user_and_stops_with_sigterm() -> None:
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", instructions("USER")[-1])
    assert instructions("STOPSIGNAL") == ["SIGTERM"]
    assert [json.loads(line) for line in instructions("ENTRYPOINT") + instructions("CMD")] == [["seqserve"], ["serve"]]


def test_variables_of_the_image_are_settings() -> None:
    said = dict(word.split("=", 1) for word in instructions("ENV")[-1].split()) | services(GPU)["service"]["environment"]
    assert load({}, said).host == "0.0.0.0"  # in a container, no client reaches 127.0.0.1
    assert instructions("EXPOSE") == [f"{Settings().port} {Settings().grpc_port}"]


def test_health_check_passes_only_when_ready() -> None:
    with answering(200) as port:
        assert health(port) == 0
    assert health(port) != 0, "the port is closed"
    with answering(503) as port:
        assert health(port) != 0


def test_health_check_asks_the_health_port() -> None:
    """It speaks plain HTTP, also where the main port has TLS."""
    with answering(200) as port:
        assert health("1", SEQSERVE_HEALTH_PORT=port, SEQSERVE_TLS_CERT="certificate.pem") == 0
        assert health(port, SEQSERVE_HEALTH_PORT="off") == 0


@pytest.mark.parametrize("file", [COMPOSE, GPU])
def test_build_arguments_exist_in_the_dockerfile(file: str) -> None:
    taken = {line.partition("=")[0] for line in instructions("ARG")}
    assert set(services(file)["service"]["build"]["args"]) <= taken


def test_mounted_files_exist_and_are_read_only() -> None:
    mounts = [mount.split(":") for one in services(COMPOSE).values() for mount in one.get("volumes", ())]
    files = [mount for mount in mounts if mount[0].startswith(".")]
    assert files
    for source, _, mode in files:
        assert (ROOT / source).exists(), source
        assert mode == "ro", source


def test_prometheus_rule_files_are_mounted() -> None:
    names = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["rule_files"]
    targets = {mount.split(":")[1] for mount in services(COMPOSE)["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in ["prometheus.yml", *names]} <= targets


def test_images_are_pinned_to_versions() -> None:
    images = [one["image"] for one in services(COMPOSE).values() if "build" not in one]
    assert images
    assert all(re.fullmatch(r".+:v?\d+\.\d+\.\d+", image) for image in images), images


def test_ports_are_published_on_localhost_by_default() -> None:
    for name, one in services(COMPOSE).items():
        assert all(re.match(r"127\.0\.0\.1:|\$\{SEQSERVE_HOST:-127\.0\.0\.1\}:", port) for port in one["ports"]), name


def test_stop_grace_period_exceeds_the_drain() -> None:
    limits = Settings()
    grace = re.fullmatch(r"(\d+)s", services(COMPOSE)["service"]["stop_grace_period"])
    assert grace
    assert int(grace[1]) > limits.lame_duck_seconds + limits.drain_seconds


def test_system_calls_are_limited_without_a_gpu() -> None:
    [file] = [option.partition(":")[2] for option in services(COMPOSE)["service"]["security_opt"] if "seccomp" in option]
    profile = json.loads((ROOT / file).read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = {name for entry in profile["syscalls"] if entry["action"] == "SCMP_ACT_ALLOW" for name in entry["names"]}
    assert not allowed & {
        "ptrace",
        "process_vm_readv",
        "mount",
        "unshare",
        "setns",
        "bpf",
        "keyctl",
        "io_uring_setup",
        "clone3",
    }
    assert not any("seccomp" in option for option in services(GPU)["service"]["security_opt"])
