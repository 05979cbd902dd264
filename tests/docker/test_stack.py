"""The container and the compose files. All tests share a stack and run in this order; the last two end it."""

from __future__ import annotations

import json
import re
import subprocess
import time
from ast import literal_eval
from typing import Any

import pytest
import yaml

from service.settings import Settings
from tests.docker.stack import ROOT, Stack
from tests.serving import eventually

README = (ROOT / "README.md").read_text()
SCRAPED_SECONDS = 30.0


def ask(stack: Stack) -> list[str]:
    """Return the labels for the question of README."""
    asked = re.search(r"-d '(.+?)'", README)
    assert asked
    answer = stack.clients["service"].post("/infer", content=asked[1], headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    return [output["label"] for output in answer.json()["outputs"]]


def query(stack: Stack, expression: str) -> list[float]:
    """Return the current values of a Prometheus expression."""
    answer = stack.clients["prometheus"].get("/api/v1/query", params={"query": expression})
    return [float(series["value"][1]) for series in answer.json()["data"]["result"]]


STATES = "print(*[file.read_text() for file in Path('/proc').glob('[0-9]*/status')])"
"""Prints the states of all processes in the container."""


def rules(stack: Stack) -> dict[str, str]:
    """Return the alerts that Prometheus loaded, and the health of each rule."""
    groups: list[dict[str, Any]] = stack.clients["prometheus"].get("/api/v1/rules").json()["data"]["groups"]
    return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}


def test_processes_run_without_privileges(stack: Stack) -> None:
    states = stack.inside_python(STATES)
    assert {uid for uids in re.findall(r"^Uid:(.+)$", states, re.MULTILINE) for uid in uids.split()} == {"10001"}
    assert {int(capabilities, 16) for capabilities in re.findall(r"^Cap(?:Eff|Prm|Bnd):\s*(\w+)$", states, re.MULTILINE)} == {0}
    assert set(re.findall(r"^NoNewPrivs:\s*(\d)$", states, re.MULTILINE)) == {"1"}


def test_root_filesystem_is_read_only(stack: Stack) -> None:
    with pytest.raises(AssertionError, match="Read-only file system"):
        stack.inside("python", "-Ic", "open('/probe', 'w')", user="0")
    stack.inside("python", "-Ic", "open('/tmp/probe', 'w')", user="0")


def test_kernel_refuses_what_the_service_never_does(stack: Stack) -> None:
    """The filter of system calls refuses namespaces, debuggers, io_uring, keys and sockets of virtual machines."""
    filtered = stack.inside_python("print(Path('/proc/1/status').read_text())")
    assert re.search(r"^Seccomp:\s*2$", filtered, re.MULTILINE)
    calls = {"unshare": "libc.unshare(0x10000000)", "ptrace": "libc.ptrace(0, 0, 0, 0)", "setns": "libc.setns(0, 0)"}
    for call in calls.values():
        refused = f"import ctypes; libc = ctypes.CDLL(None, use_errno=True); print({call}, ctypes.get_errno())"
        assert stack.inside_python(refused).split() == ["-1", "1"]
    with pytest.raises(AssertionError, match="Operation not permitted"):
        stack.inside_python("import socket; socket.socket(40)")


def test_image_has_no_program_but_python(stack: Stack) -> None:
    """Neither a shell nor a package manager nor a compiler."""
    listed = "print(sorted({file.name for folder in ('bin', 'sbin', 'usr/local/bin') for file in Path('/', folder).iterdir()}))"
    assert set(literal_eval(stack.inside_python(listed))) == {"ldconfig", "python", "python3", "python3.11"}
    with pytest.raises(AssertionError, match="No module named"):
        stack.inside("python", "-Im", "pip")
    for program in ("sh", "bash", "pip", "apt-get", "perl", "gcc"):
        with pytest.raises(AssertionError, match="executable file not found"):
            stack.inside(program)


def test_image_can_save_sessions_in_redis(stack: Stack) -> None:
    """The store opens without a connection, and would refuse a URL if the package were missing."""
    opened = (
        "from service.store.redis_store import RedisStore; print(type(RedisStore('redis://127.0.0.1:1/0', 'a', 60)).__name__)"
    )
    assert stack.inside_python(opened).strip() == "RedisStore"


def test_it_answers_the_question_of_the_readme(stack: Stack) -> None:
    shown = re.search(r"```json\n(.+?)```", README, re.DOTALL)
    assert shown
    assert ask(stack) == [output["label"] for output in json.loads(shown[1])["outputs"]]


def test_prometheus_scrapes_the_service(stack: Stack) -> None:
    ask(stack)
    eventually(lambda: query(stack, 'up{job="seqserve"}') == [1], SCRAPED_SECONDS)
    eventually(lambda: query(stack, "sum(seqserve_requests_total) > 0"), SCRAPED_SECONDS)


def test_prometheus_evaluates_every_rule(stack: Stack) -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "rules.yml").read_text())["groups"]
    shipped = {rule.get("alert") or rule["record"]: "ok" for group in groups for rule in group["rules"]}
    eventually(lambda: rules(stack) == shipped, SCRAPED_SECONDS)


def test_grafana_shows_the_dashboard_without_login(stack: Stack) -> None:
    image = stack.config()["services"]["grafana"]["image"]
    if subprocess.run(["docker", "image", "inspect", image], env=stack.variables, capture_output=True).returncode:
        pulled = subprocess.run(["docker", "pull", image], env=stack.variables, capture_output=True, text=True)
        if pulled.returncode:
            pytest.skip(f"{image} is not on this engine and cannot be pulled, so Grafana is untested: {pulled.stderr.strip()}")
    stack.start("grafana")
    grafana = stack.clients["grafana"]
    eventually(lambda: stack.reaches("grafana", "/api/health"), 60)
    home = grafana.get("/api/dashboards/home").json()
    shipped = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "seqserve.json").read_text())
    assert home["dashboard"]["title"] == shipped["title"]
    assert grafana.get(f"/api/dashboards/uid/{shipped['uid']}").status_code == 200


def test_killed_engine_restarts_in_the_container(stack: Stack) -> None:
    pid, before = stack.engine(), ask(stack)
    stack.inside_python(f"os.kill({pid}, 9)")
    eventually(lambda: stack.engine() not in ("", pid), 10)
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
