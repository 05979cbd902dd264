"""docs/ray.md on two nodes: its commands, with other ports, deploy the service, which Ray scales and repairs."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from loadtest.servers import free_ports
from tests.docs.test_pages import ROOT, requests
from tests.serving import eventually, sum_of

RAY = ROOT / ".venv-ray" / "bin"
PAGE = (ROOT / "docs" / "ray.md").read_text()
CONFIG = "deploy/ray/serve.yaml"
HOSTS = ("127.0.0.2", "127.0.0.3")
STARTED = "Ray runtime started"
SESSIONS = 30
START_SECONDS = 180


class Nodes:
    """Two nodes on this machine. Commands run in `folder`, which has a copy of serve.yaml."""

    def __init__(self, folder: Path) -> None:
        self.gcs, self.dashboard, self.port, self.other_port, *self._ports = free_ports(7)
        self._folder = folder
        self._environment = os.environ | {
            "PATH": f"{RAY}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0" * 64,
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self.other_port),  # both nodes have the same addresses
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # on a busy machine a proxy does not start within Ray's 5 s
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "SEQSERVE_CHECKPOINT_CHUNKS": "3",
            "SEQSERVE_DEVICE": "cpu",
            "SEQSERVE_FRONTENDS": "1",
            "SEQSERVE_DEFAULT_DEADLINE_MS": "60000",
            "SEQSERVE_SESSION_IDLE_SECONDS": "600",
        }
        self._nodes: list[psutil.Popen] = []

    @contextmanager
    def started(self) -> Iterator[None]:
        """Run the nodes until the end of the block."""
        head_ports = ("--port", self.gcs, "--dashboard-port", self.dashboard, "--ray-client-server-port", self._ports[0])
        commands = [[*command("ray start --head"), *map(str, head_ports)], command("ray start --address")]
        with ExitStack() as running:
            running.callback(self._kill)
            for host, words, port in zip(HOSTS, commands, self._ports[1:], strict=True):
                words = [word.replace("HEAD:6379", f"{HOSTS[0]}:{self.gcs}") for word in words]
                ports = ("--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={port}")
                size = ("--num-cpus=2", "--object-store-memory=80000000")
                self._start([*words, "--block", f"--node-ip-address={host}", *ports, *size], self._folder / f"{host}.log")
            yield

    def _start(self, words: list[str], log: Path) -> None:
        with log.open("w") as output:
            process = psutil.Popen(words, env=self._environment, cwd=self._folder, stdout=output, stderr=output)
        self._nodes.append(process)
        eventually(lambda: STARTED in log.read_text() or process.poll() is not None, START_SECONDS)
        assert STARTED in log.read_text(), log.read_text()

    def _kill(self) -> None:
        """End all processes at once: an orderly end of Ray takes half a minute."""
        processes = [*self._below(), *self._nodes]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, 60)

    def _below(self) -> set[psutil.Process]:
        """Return the processes that the running nodes started."""
        return {child for node in self._nodes if node.poll() is None for child in node.children(recursive=True)}

    def run(self, *words: str) -> str:
        return subprocess.run(
            words, env=self._environment, cwd=self._folder, capture_output=True, text=True, timeout=START_SECONDS, check=True
        ).stdout

    def deploy(self, **changes: str) -> None:
        """Deploy serve.yaml with another port, a session store, and changes of its values. Wait until Ray has made them."""
        text = (ROOT / CONFIG).read_text().replace("# SEQSERVE_SESSION_STORE", "SEQSERVE_SESSION_STORE")
        changes |= {"port": str(self.port), "SEQSERVE_SESSION_STORE": str(self._folder / "sessions")}
        for name, value in changes.items():
            text, count = re.subn(rf"\b{name}: [^ ,}}]+", f"{name}: {value}", text)
            assert count == 1, name
        (self._folder / CONFIG).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / CONFIG).write_text(text)
        self.run(*command("serve deploy"))

    def await_replicas(self, count: int) -> None:
        """Wait until this number of replicas runs, and no other replica starts or stops."""
        states = rf"status: RUNNING\n(?:.*\n)+? +replica_states:\n +RUNNING: {count}\n +message: ''"
        eventually(lambda: re.search(states, self.run(*command("serve status"))), START_SECONDS)

    def servers(self) -> set[psutil.Process]:
        """Return the supervisors of the servers."""
        return {process for process in self._below() if "--grpc-port" in arguments(process)}


def command(start: str) -> list[str]:
    """Return the command of the page that starts so."""
    [line] = re.findall(rf"^{start}.*", PAGE, re.MULTILINE)
    return shlex.split(line, comments=True)


def arguments(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return words


def open_sessions(server: psutil.Process) -> int:
    words = arguments(server)
    metrics = httpx.get(f"http://127.0.0.1:{words[words.index('--port') + 1]}/metrics", timeout=60, trust_env=False)
    return int(sum_of(metrics.text, "seqserve_sessions", {}))


def infer(url: str, body: dict[str, object], session: str = "") -> httpx.Response:
    headers = {"x-session-id": session} if session else {}
    return httpx.post(f"{url}/infer", json=body, headers=headers, timeout=60, trust_env=False)


def inputs(session: str, steps: int) -> list[list[float]]:
    """Return the first steps of a session."""
    chance = random.Random(session)
    return [[chance.uniform(-1, 1) for _ in range(3)] for _ in range(steps)]


def send_chunks(url: str, steps: dict[str, int], *, naming: Collection[str] = ()) -> set[str]:
    """Send the next step of each session, and check that the answers are those for whole sequences.

    steps: of each session so far. naming: sessions whose chunks name these steps. Returns the sessions that are lost: `steps` then has the
    steps that are left.
    """
    lost, values = set(), {}
    for name, count in steps.items():
        body = {"model": "sensor-forecast", "session": name, "start": count == 0, "inputs": [inputs(name, count + 1)[count:]]}
        reply = infer(url, body | ({"steps": count} if name in naming else {}), name)
        answer = reply.json()
        if reply.status_code == 409 and answer["code"] == "session_lost":
            lost.add(name)
            steps[name] = answer.get("steps", 0)
        else:
            assert reply.status_code == 200, reply.text
            steps[name] += 1
            assert answer["session"]["steps"] == steps[name]
            values[name] = answer["outputs"][0]["value"]
    whole = infer(url, {"model": "sensor-forecast", "inputs": [inputs(name, steps[name]) for name in values]}).json()
    for value, output in zip(values.values(), whole["outputs"], strict=True):
        assert value == pytest.approx(output["value"], rel=1e-4, abs=1e-5)
    return lost


def check_websocket(url: str) -> None:
    """Check that a WebSocket carries a session, and that the server's refusal of another reaches the client."""
    stream = url.replace("http", "ws") + "/stream"
    with connect(f"{stream}?model=sensor-forecast", additional_headers={"x-session-id": "stream"}) as socket:
        for steps in (1, 2):
            socket.send(json.dumps({"input": [[0.1, -0.4, 0.2]], "end": steps == 2}))
            assert json.loads(socket.recv(60))["session"] == {"id": "stream", "steps": steps}
    with pytest.raises(InvalidStatus, match="400"), connect(stream):
        pass


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    if not RAY.exists():
        pytest.skip("Ray is missing: `make test-all` installs it into .venv-ray")
    # Ray's sockets have long names below this folder, and a socket's name has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = Nodes(Path(folder))
        with made.started():
            yield made


def test_page_deploys_replicas_that_scale_and_come_back(nodes: Nodes) -> None:
    nodes.deploy()
    nodes.await_replicas(2)
    urls = [f"http://127.0.0.1:{port}" for port in (nodes.port, nodes.other_port)]
    [example] = requests(PAGE)
    for url in urls:
        reply = infer(url, example.bodies[0])
        assert reply.status_code == 200, reply.text
        assert reply.json()["outputs"][0]["label"] == "HUM"

    check_websocket(urls[1])
    steps = {f"session {number}": 0 for number in range(SESSIONS)}
    assert [send_chunks(url, steps) for url in (*urls, *urls)] == [set()] * 4

    first = nodes.servers()
    nodes.deploy(min_replicas="3")
    nodes.await_replicas(3)
    [third] = nodes.servers() - first
    assert [send_chunks(url, steps) for url in urls] == [set()] * 2
    eventually(lambda: sum(map(open_sessions, nodes.servers())) == SESSIONS)
    assert open_sessions(third) > 0

    killed = first.pop()
    owned = open_sessions(killed)
    killed.kill()
    eventually(lambda: len(nodes.servers() - {killed}) == 3, START_SECONDS)
    nodes.await_replicas(3)
    lost = send_chunks(urls[0], steps, naming=set(list(steps)[::2]))
    assert 0 < len(lost) <= owned
    assert send_chunks(urls[1], steps, naming=steps) == set()

    nodes.deploy(max_replicas="2")
    nodes.await_replicas(2)
    assert [send_chunks(url, steps) for url in urls] == [set()] * 2

    nodes.run("serve", "shutdown", "--yes")
    eventually(lambda: not nodes.servers(), START_SECONDS)
