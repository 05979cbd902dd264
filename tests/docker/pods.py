"""Pods of the Helm chart as containers on the host's network, each with its own address of loopback.

This module replaces the parts of Kubernetes that a rollout needs: the kubelet runs probes, preStop and the grace period, the controller of
the Deployment adds and ends pods, and the controller of the endpoints enables and disables their addresses in HAProxy.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import eventually

ENDPOINT_SECONDS = 2.0
"""How long after SIGTERM the proxy still sends requests to a pod."""
Docker = Callable[..., str]

CONFIGURATION = """
global
    stats socket {control} mode 600 level admin
defaults
    mode http
    # A request that fails stays failed: the proxy repeats nothing.
    retries 0
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend http
    bind 127.0.0.1:{http}
    default_backend http
frontend grpc
    bind 127.0.0.1:{grpc} proto h2
    default_backend grpc
backend http
    balance roundrobin
{http_servers}
backend grpc
    balance roundrobin
{grpc_servers}
"""


class Proxy:
    """HAProxy in front of addresses that may have a pod. It sends requests only to enabled addresses."""

    def __init__(self, hosts: Sequence[str], pod_ports: tuple[int, int], ports: tuple[int, int], scratch: Path) -> None:
        program = shutil.which("haproxy")
        if program is None:
            pytest.skip("haproxy is missing: `make programs PROGRAMS=proxies` installs it")
        self.http, self.grpc = ports
        self._control = scratch / "control"
        servers = [
            "\n".join(f"    server {host} {host}:{port}{options} disabled" for host in hosts)
            for port, options in ((pod_ports[0], ""), (pod_ports[1], " proto h2"))
        ]
        file = scratch / "haproxy.cfg"
        file.write_text(
            CONFIGURATION.format(
                control=self._control, http=self.http, grpc=self.grpc, http_servers=servers[0], grpc_servers=servers[1]
            )
        )
        with (scratch / "haproxy.log").open("w") as log:
            self._process = subprocess.Popen([program, "-db", "-f", str(file)], stderr=log)
        eventually(self._control.exists)

    def enable(self, host: str) -> None:
        self._set(host, "ready")

    def disable(self, host: str) -> None:
        self._set(host, "maint")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _set(self, host: str, state: str) -> None:
        for backend in ("http", "grpc"):
            with socket.socket(socket.AF_UNIX) as control:
                control.connect(str(self._control))
                control.sendall(f"set server {backend}/{host} state {state}\n".encode())
                assert control.recv(1000).strip() == b""


class Pod:
    """A container with the options, variables and probes of a pod template."""

    def __init__(self, docker: Docker, template: dict[str, Any], host: str, ports: tuple[int, int]) -> None:
        """template: of the Deployment. ports: for HTTP and gRPC, in place of the ports in the template."""
        self.host, self._docker = host, docker
        self._spec = template["spec"]
        self._container = self._spec["containers"][0]
        self._address = f"http://{host}:{ports[0]}"
        own = {"SEQSERVE_HOST": host, "SEQSERVE_PORT": str(ports[0]), "SEQSERVE_GRPC_PORT": str(ports[1])}
        self.id = docker("run", "--detach", *self._options(own), self._container["image"]).strip()
        self._await(self._container["startupProbe"])

    def is_ready(self) -> bool:
        return self._passes(self._container["readinessProbe"])

    def stop(self) -> tuple[int, float]:
        """End the container as the kubelet does. Returns its exit status and the seconds that it took."""
        started = time.monotonic()
        pre_stop = self._container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        time.sleep(pre_stop)
        self._docker("stop", "--time", str(self._spec["terminationGracePeriodSeconds"] - pre_stop), self.id)
        took = time.monotonic() - started
        return int(self._docker("inspect", "--format", "{{.State.ExitCode}}", self.id)), took

    def remove(self) -> str:
        """Remove the container and return its log."""
        log = subprocess.run(["docker", "logs", self.id], capture_output=True, text=True).stderr
        self._docker("rm", "--force", self.id)
        return log

    def _options(self, own: dict[str, str]) -> list[str]:
        context, pod_context = self._container["securityContext"], self._spec["securityContext"]
        options = ["--network", "host", "--user", f"{pod_context['runAsUser']}:{pod_context['runAsGroup']}"]
        options += ["--memory", self._container["resources"]["limits"]["memory"].removesuffix("i").lower()]
        if context["readOnlyRootFilesystem"]:
            options.append("--read-only")
        if not context["allowPrivilegeEscalation"]:
            options += ["--security-opt", "no-new-privileges:true"]
        options += [f"--cap-drop={capability}" for capability in context["capabilities"]["drop"]]
        options += [f"--tmpfs={mount['mountPath']}" for mount in self._container["volumeMounts"]]
        environment = {each["name"]: each["value"] for each in self._container["env"]} | own
        return options + [f"--env={name}={value}" for name, value in environment.items()]

    def _passes(self, probe: dict[str, Any]) -> bool:
        request = probe["httpGet"]
        try:
            answer = httpx.get(f"{self._address}{request['path']}", timeout=probe["timeoutSeconds"], trust_env=False)
        except httpx.TransportError:
            return False
        return 200 <= answer.status_code < 400

    def _await(self, probe: dict[str, Any]) -> None:
        """Wait until the probe passes."""
        for _ in range(probe["failureThreshold"]):
            if self._passes(probe):
                return
            time.sleep(probe["periodSeconds"])
        raise AssertionError(f"{self.host} did not start:\n{self.remove()}")


class Rollout:
    """Pods of a Deployment behind a proxy."""

    def __init__(
        self, docker: Docker, deployment: dict[str, Any], hosts: Sequence[str], ports: tuple[int, int], proxy: Proxy
    ) -> None:
        self._docker, self._spec, self._ports, self._proxy = docker, deployment["spec"], ports, proxy
        self._hosts = iter(hosts)
        self._stopping: list[threading.Thread] = []
        self.pods: list[Pod] = []
        """The pods that serve, the oldest first."""
        self.started: list[Pod] = []
        self.stopped: list[tuple[int, float]] = []
        """Exit status and seconds of each stop."""

    def start(self) -> None:
        """Start a pod, and send requests to it once it is ready."""
        pod = Pod(self._docker, self._spec["template"], next(self._hosts), self._ports)
        self.started.append(pod)
        eventually(pod.is_ready)
        self._proxy.enable(pod.host)
        self.pods.append(pod)

    def stop_oldest(self) -> None:
        """Begin to end a pod. The proxy learns of it later."""
        pod = self.pods.pop(0)
        stopping = threading.Thread(target=lambda: self.stopped.append(pod.stop()))
        removing = threading.Timer(ENDPOINT_SECONDS, self._proxy.disable, [pod.host])
        for thread in (stopping, removing):
            thread.start()
            self._stopping.append(thread)

    def replace_all(self) -> None:
        """Replace every pod: add a pod, and end an old pod once the new pod was ready for long enough. Returns when all have ended."""
        assert self._spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        for _ in range(len(self.pods)):
            self.start()
            time.sleep(self._spec["minReadySeconds"])
            self.stop_oldest()
        self._await_stops()

    def _await_stops(self) -> None:
        for thread in self._stopping:
            thread.join()

    def close(self) -> None:
        """Remove all containers and print their logs, which pytest shows for a failed test."""
        self._await_stops()
        for pod in self.started:
            print(f"{pod.host}:\n{pod.remove()}")


@contextmanager
def repeating(*clients: Callable[[], object]) -> Iterator[tuple[list[None], list[str]]]:
    """Call each client repeatedly, each in its own thread, until the block ends. Yields the successes and the failures."""
    successes, failures, ended = list[None](), list[str](), threading.Event()

    def repeat(client: Callable[[], object]) -> None:
        while not ended.is_set():
            try:
                client()
            except Exception as error:
                # The repr of an error of the gRPC client says nothing.
                failures.append(f"{time.monotonic()}: {type(error).__name__}: {error}")
            else:
                successes.append(None)

    with ThreadPoolExecutor(len(clients)) as pool:
        calls = [pool.submit(repeat, client) for client in clients]
        try:
            yield successes, failures
        finally:
            ended.set()
            for call in calls:
                call.result()
