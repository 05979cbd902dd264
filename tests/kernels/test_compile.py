"""Where compiled kernels are kept, and what is compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernels import compile as compiler
from kernels import lstm
from service.settings import Settings

SOURCES = sorted(Path(lstm.__file__).parent.glob("*.cu"))


def test_the_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path / "new" / "kernels"))
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    assert compiler.folder() == tmp_path / "new" / "kernels"
    assert (tmp_path / "new" / "kernels").is_dir()
    compiler._tell_cupy()
    assert os.environ["CUPY_CACHE_DIR"] == str(tmp_path / "new" / "kernels")


def test_without_it_the_folder_is_this_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEQSERVE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.folder() == tmp_path / ".cache" / "seqserve"


def test_kernels_are_kept_in_memory_where_no_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path / "file" / "kernels"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    assert compiler.folder() is None
    compiler._tell_cupy()
    assert os.environ["CUPY_CACHE_IN_MEMORY"] == "1"


def test_kernels_are_kept_in_memory_where_the_folder_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert compiler.folder() is None


def test_the_service_and_the_kernels_mean_the_same_folder_when_none_is_named() -> None:
    assert Settings().cache == Path(compiler.DEFAULT_CACHE)


def test_the_service_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", "elsewhere")
    compiler.keep_in(tmp_path)
    assert compiler.folder() == tmp_path


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_a_source_is_compiled_with_what_it_includes(source: Path) -> None:
    text = compiler._text(source)
    assert "#include" in source.read_text()
    assert "#include" not in text
    assert (source.parent / "cell.cuh").read_text() in text


def test_every_thread_of_a_block_has_its_share_of_the_registers() -> None:
    assert [compiler.registers(threads) for threads in (64, 256, 320, 384, 512, 1024)] == [255, 255, 200, 168, 128, 64]
