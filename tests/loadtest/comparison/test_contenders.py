"""Servers that cannot run are named with the reason, and every launch finds its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.comparison import contenders
from loadtest.comparison.contenders import PLAIN, SEQSERVE, SERVED, SERVERS, TORCHSERVE, TRITON, Ports, Server

BY_NAME = {server.name: server for server in SERVERS}


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(contenders, "ENVIRONMENTS", tmp_path)
    return tmp_path


def installed(environments: Path, server: Server) -> Path:
    folder = environments / str(server.environment)
    folder.mkdir()
    (folder / "installed").touch()
    return folder


def test_server_that_is_not_installed_says_why(environments: Path) -> None:
    triton = BY_NAME[TRITON]
    assert triton.why_skipped() == "not installed: run `make bench-serve`"
    (environments / "triton").mkdir()
    (environments / "triton" / "install.log").write_text("one\nERROR: no such version\n\n")
    assert triton.why_skipped() == "not installed: ERROR: no such version"


def test_server_that_lacks_a_program_says_which(environments: Path) -> None:
    server = replace(BY_NAME[TORCHSERVE], needs="no-such-program")
    installed(environments, server)
    assert server.why_skipped() == "no-such-program is not installed"
    assert replace(server, needs="python3").why_skipped() is None


def test_servers_in_our_environment_always_run(environments: Path) -> None:
    assert [name for name, server in BY_NAME.items() if server.why_skipped() is None] == [SEQSERVE, PLAIN]


@pytest.mark.parametrize("server", [server for server in SERVERS if server.environment], ids=lambda server: server.name)
def test_requirements_are_exact(server: Server) -> None:
    lines = (contenders.BASELINES / f"{server.environment}.txt").read_text().splitlines()
    assert len(lines) > 3 and all(line.startswith("#") or line.count("==") == 1 for line in lines)


def test_torchserve_gets_a_model_folder_and_its_settings(tmp_path: Path) -> None:
    launch = BY_NAME[TORCHSERVE].launch(tmp_path / "environment", tmp_path, Ports(1, 2, 3))
    properties = dict(line.split("=", 1) for line in (tmp_path / "config.properties").read_text().splitlines())
    assert properties["inference_address"] == "http://127.0.0.1:1" and '"batchSize": 32' in properties["models"]
    assert {path.name for path in (tmp_path / "store" / SERVED).iterdir()} == {"MAR-INF", "torchserve_handler.py"}
    assert str(tmp_path / "log4j2.xml") in launch.command


def test_triton_gets_a_repository_and_its_interpreter(tmp_path: Path) -> None:
    program = tmp_path / "environment" / "lib" / "python3.11" / "site-packages" / "pytriton" / "tritonserver"
    stub = program / "python_backend_stubs" / "3.11" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.write_text("a program")
    launch = BY_NAME[TRITON].launch(tmp_path / "environment", tmp_path, Ports(1, 2, 3))
    assert (tmp_path / "backends" / "python" / stub.name).read_text() == "a program"
    config = (tmp_path / "repository" / SERVED / "config.pbtxt").read_text()
    assert "max_queue_delay_microseconds: 0" in config and "dims: [6]" in config
    assert launch.command[0] == str(program / "bin" / "tritonserver") and "--http-port=1" in launch.command
