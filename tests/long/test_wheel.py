"""The wheel, installed without the repository."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.docs.test_pages import README, requests
from tests.serving import Server  # noqa: F401  # tests/conftest.py runs modules that start servers first

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "service", "kernels", "loadtest", "models")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the working tree. It is built elsewhere, because setuptools writes into the folder of the sources."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(built))
    subprocess.run([*PIP, "wheel", *options, str(source)], check=True, timeout=600)
    [file] = built.iterdir()
    return file


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel. Its dependencies come from the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=600)
    python = folder / "bin" / "python"
    subprocess.run([*PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True, timeout=600)
    [site_packages] = (folder / "lib").glob("python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.fixture(scope="module")
def address(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `seqserve serve`, started from the wheel in an empty folder."""
    command = [str(environment / "bin" / "seqserve"), "serve", "--port", "0", "--grpc-port", "0", "--device", "cpu"]
    empty = tmp_path_factory.mktemp("empty")
    with subprocess.Popen(command, cwd=empty, env=clean(), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready = re.search(r"ready on (http://\S+)", server.stdout.readline())
        assert ready, "the service did not start"
        try:
            yield ready[1]
        finally:
            server.send_signal(signal.SIGINT)
    assert list(empty.iterdir()) == []


def clean() -> dict[str, str]:
    """Return the environment without variables that lead Python to the repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def test_wheel_has_every_file_of_the_embedded_models(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    models = {file.relative_to(ROOT / "models").as_posix() for file in (ROOT / "models").rglob("*") if file.is_file()}
    assert {name.removeprefix("service/embedded_models/") for name in names if "embedded_models" in name} == models


def test_installed_wheel_serves_the_embedded_models(address: str) -> None:
    [example] = requests(README)
    reply = httpx.post(f"{address}/infer", json=example.bodies[0], timeout=60, trust_env=False).json()
    assert example.reply is not None
    assert reply["outputs"][0]["label"] == example.reply["outputs"][0]["label"]
