"""The machine code of a function is compiled once for a folder, wherever its source file is."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels.cpu import cache
from kernels.folder import CACHE

pytest.importorskip("kernels.cpu.compiled")

SOURCE = """
from kernels.cpu.compiled import Compiled
from kernels.cpu.rows import longs

@Compiled
def double(number: int, out: int) -> None:
    longs(out, 1)[0] = 2 * number
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of compiled kernels."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    code = cache.code_folder()
    assert code is not None
    yield code
    if code.exists():
        for parent in (code, *code.glob("*")):
            parent.chmod(0o755)


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


def doubled(module: ModuleType, number: int) -> int:
    out = torch.zeros(1, dtype=torch.int64)
    module.double(number, out.data_ptr())
    return int(out)


def hits(module: ModuleType) -> int:
    """Return how many signatures were read from the folder."""
    return sum(module.double.machine_code.stats.cache_hits.values())


def test_another_installation_reads_the_machine_code(folder: Path, tmp_path: Path) -> None:
    first, second = installed(tmp_path / "first"), installed(tmp_path / "second")
    assert doubled(first, 21) == 42 and hits(first) == 0
    assert [path.name for path in folder.iterdir()] == ["double"]
    assert doubled(second, 4) == 8 and hits(second) == 1


def test_machine_code_is_read_from_a_folder_that_cannot_be_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doubled(installed(tmp_path / "first"), 1) == 2
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for path in (*folder.glob("*"), folder):
        path.chmod(0o555)
    monkeypatch.setattr("kernels.cpu.compiled.cache_folder", lambda: None)  # the rights do not bind root
    second = installed(tmp_path / "second")
    assert doubled(second, 3) == 6 and hits(second) == 1
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == files


def test_function_is_compiled_without_a_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.compiled.cache_folder", lambda: None)
    assert doubled(installed(tmp_path / "first"), 5) == 10
    assert not folder.exists()
