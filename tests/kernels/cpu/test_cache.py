"""Tests of the folder of compiled loops: when it may be used, and which process fills it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.cpu import cache, target
from kernels.folder import CACHE


@pytest.fixture(autouse=True)
def _fresh_target() -> Iterator[None]:
    target.host_target.cache_clear()
    yield
    target.host_target.cache_clear()


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the file that shows that every loop is compiled."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    folder = cache.code_folder()
    assert folder is not None
    folder.mkdir()
    (folder / cache.COMPLETE).touch()
    return folder


def test_empty_folder_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "new"))
    assert cache.missing() == cache.NOT_COMPILED


def test_complete_folder_is_used(complete: Path) -> None:
    assert cache.missing() is None


def test_read_only_folder_is_used(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "cache_folder", lambda: None)
    assert cache.missing() is None


def test_folder_that_cannot_be_written_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "folder"))
    assert "cannot be written" in str(cache.missing())


def test_missing_numba_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "find_spec", lambda _: None)
    assert cache.missing() == "Numba is not installed"


@pytest.mark.parametrize(
    "machine, features, name",
    [
        ("x86_64", {"avx2", "fma", "bmi2", "f16c", *target.AVX512}, "x86-64-v4"),
        ("x86_64", {"avx2", "fma", "bmi2", "f16c", "avx512f"}, "x86-64-v3"),
        ("x86_64", {"sse2"}, None),
        ("aarch64", set(), "generic"),
        ("arm64", set(), "generic"),
        ("riscv64", set(), None),
    ],
)
def test_fastest_target_of_the_processor(
    machine: str, features: set[str], name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(target.TARGET, raising=False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: dict.fromkeys(features, True))
    fastest = target.host_target()
    assert (None if fastest is None else fastest.name) == name
    assert (cache.missing() is not None and "needs a processor" in str(cache.missing())) is (name is None)


def test_environment_names_another_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv(target.TARGET, "x86-64-v3")
    fastest = target.host_target()
    assert fastest is not None and fastest.lanes == 8


def test_command_returns_at_once_when_everything_is_compiled(complete: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "kernels.cpu"], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_command_for_all_targets_names_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.cpu import __main__ as command

    targets: list[str] = []

    def run(arguments: list[str], env: dict[str, str]) -> Any:
        targets.append(env[target.TARGET])
        return SimpleNamespace(returncode=len(targets) - 1)

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "argv", ["kernels.cpu", "--all"])
    assert command.main() == 1, "the status of a target that failed"
    assert targets == ["x86-64-v4", "x86-64-v3"]
