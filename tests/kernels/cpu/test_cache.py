"""The folder of compiled loops: when it may be used, and that machine code is compiled once for a folder, wherever its source file is."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from kernels.cpu import __main__ as command
from kernels.cpu import cache, target
from kernels.cpu.compiled import _dump
from kernels.folder import CACHE, keep


@pytest.fixture(autouse=True)
def _fresh_target() -> Iterator[None]:
    target.host_target.cache_clear()
    yield
    target.host_target.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the machine code, which is not there yet."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return (tmp_path / "cache" / cache.code_file("")).resolve()


def test_complete_folder_is_used_even_if_it_is_read_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache.missing() == cache.NOT_COMPILED
    for name, content in (("run", b"code"), (cache.COMPLETE, cache.code_file("run").encode())):
        keep(cache.code_file(name), content)
    assert cache.missing() is None
    monkeypatch.setattr(cache, "cache_folder", lambda: None)
    assert cache.missing() is None
    monkeypatch.setattr(sys, "argv", ["kernels.cpu"])
    assert command.main() == 0 and capsys.readouterr() == ("", ""), "everything is compiled"
    (folder / "run").write_bytes(b"")
    assert cache.missing() is not None, "a file is damaged"


def test_loops_that_cannot_run_name_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "folder"))
    assert "cannot be written" in str(cache.missing())
    monkeypatch.setattr(cache, "find_spec", lambda _: None)
    assert cache.missing() == "Numba is not installed"


@pytest.mark.parametrize(
    "machine, features, name",
    [
        ("x86_64", {"avx2", "fma", "bmi2", "f16c", *target.AVX512}, "x86-64-v4"),
        ("x86_64", {"avx2", "fma", "bmi2", "f16c", "avx512f"}, "x86-64-v3"),
        ("x86_64", {"sse2"}, None),
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


SOURCE = """
from kernels.cpu.compiled import Compiled
from kernels.cpu.rows import longs

@Compiled
def double(number: int, out: int) -> None:
    longs(out, 1)[0] = 2 * number
"""


def installed(place: Path) -> ModuleType:
    """Return the module of a new installation at this place."""
    from kernels.cpu import compiled

    file = place / "kernels" / "double" / "cpu_loops.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("kernels.double.cpu_loops", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    compiled.ALL.pop()
    return module


def doubled(module: ModuleType, number: int) -> tuple[int, bool]:
    """Return the result of the compiled function, and whether it was read from the folder."""
    out = torch.zeros(1, dtype=torch.int64)
    with patch("kernels.cpu.compiled._dump", wraps=_dump) as written:
        module.double(number, out.data_ptr())
    return int(out), not written.called


def last_write(file: Path) -> tuple[int, int, int, int]:
    """Return the attributes that a write changes. A read changes the time of access alone."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def test_another_installation_reads_the_machine_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doubled(installed(tmp_path / "first"), 21) == (42, False)
    (file,) = folder.iterdir()
    before = last_write(file)
    assert doubled(installed(tmp_path / "second"), 4) == (8, True)
    monkeypatch.setattr("kernels.folder.cache_folder", lambda: None)  # as if the folder could not be written
    assert doubled(installed(tmp_path / "third"), 3) == (6, True) and last_write(file) == before
    file.unlink()
    assert doubled(installed(tmp_path / "fourth"), 5) == (10, False) and not list(folder.iterdir())


def test_damaged_machine_code_is_compiled_again(folder: Path, tmp_path: Path) -> None:
    """And a pickle in its place is not read."""
    doubled(installed(tmp_path / "first"), 1)
    (file,) = folder.iterdir()
    for content in (b"", file.read_bytes()[:-1], pickle.dumps(print)):
        file.write_bytes(content)
        assert doubled(installed(tmp_path / f"after {len(content)}"), 4) == (8, False)
    assert doubled(installed(tmp_path / "last"), 3) == (6, True)


def test_compile_all_compiles_every_loop_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kernels.cpu import compiled

    done: list[bool] = []

    def compile() -> None:
        done.append(cache.missing() is None)
        keep(cache.code_file("run"), b"code")

    function = SimpleNamespace(file=cache.code_file("run"), compile=compile)
    monkeypatch.setattr(compiled, "ALL", [function, function])
    monkeypatch.setattr(compiled, "LOOPS", "nothing")
    monkeypatch.setattr(sys, "argv", ["kernels.cpu"])
    assert command.main() == 0
    assert done == [False, False] and cache.missing() is None
    first, second = capsys.readouterr().err.splitlines()
    assert "kernel 1 of 2" in first and "kernel 2 of 2" in second
