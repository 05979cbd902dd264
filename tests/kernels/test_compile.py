"""Where compiled kernels are kept, and what is compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernels import compile as compiler
from kernels import lstm

SOURCES = sorted(Path(lstm.__file__).parent.glob("*.cu"))


def test_the_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path / "new" / "kernels"))
    assert compiler.folder() == tmp_path / "new" / "kernels"
    assert compiler.folder().is_dir()


def test_without_it_the_folder_is_this_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEQSERVE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.folder() == tmp_path / ".cache" / "seqserve"


def test_a_folder_that_cannot_be_made_is_replaced_by_a_passing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path / "file" / "kernels"))
    assert compiler.folder().name == f"seqserve-{os.getuid()}"


def test_a_folder_that_cannot_be_written_is_replaced_by_a_passing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert compiler.folder().name == f"seqserve-{os.getuid()}"


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
