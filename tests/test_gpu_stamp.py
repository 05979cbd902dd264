"""The record of the kernels that passed on a GPU: the changes that make it stale, and the runs that may write it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.__main__ import ALONE, main
from tests.gpu.stamp import kernels_hash

PASSES = "def test_it(): pass\n"
FAILS = "def test_that(): assert False\n"
SKIPPED = "import pytest\n\n@pytest.mark.skip(reason='needs a GPU')\ndef test_those(): pass\n"


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A folder with a file of each kind."""
    folder = tmp_path / "kernels"
    for name in ("backend.py", "lstm/lstm.cu", "lstm/cell.cuh", "tuned/h200.json", "tuned/h200.toml", "bench/report.py"):
        write(folder / name, name)
    return folder


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "passed.json"


@pytest.fixture
def run(pytester: pytest.Pytester, kernels: Path, record: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A run over tests with this code, on a machine that has a GPU; pytester forgets the modules that it imports."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return lambda code, *arguments: main(arguments, pytester.makepyfile(code), kernels, record, workers=0)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def said(kernels: Path, record: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["--stale"], kernels=kernels, record=record) == 0
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err


@pytest.mark.parametrize("name", ["backend.py", "lstm/lstm.cu", "lstm/cell.cuh", "tuned/h200.json", "tuned/h200.toml"])
def test_the_hash_changes_with_the_content_of_a_file(name: str, kernels: Path) -> None:
    before = kernels_hash(kernels)
    write(kernels / name, "otherwise")
    assert kernels_hash(kernels) != before


@pytest.mark.parametrize("name", ["walk.py", "lstm/grid.cu", "lstm/bench/grid.cu"])
def test_the_hash_changes_with_a_new_file(name: str, kernels: Path) -> None:
    before = kernels_hash(kernels)
    write(kernels / name, "")
    assert kernels_hash(kernels) != before


@pytest.mark.parametrize("name", ["lstm/grid.cu", "gru/lstm.cu"])
def test_the_hash_changes_when_a_file_is_renamed(name: str, kernels: Path) -> None:
    before = kernels_hash(kernels)
    (kernels / "gru").mkdir()
    (kernels / "lstm" / "lstm.cu").rename(kernels / name)
    assert kernels_hash(kernels) != before


def test_the_hash_changes_when_two_files_swap_contents(kernels: Path) -> None:
    before = kernels_hash(kernels)
    write(kernels / "lstm/lstm.cu", "lstm/cell.cuh")
    write(kernels / "lstm/cell.cuh", "lstm/lstm.cu")
    assert kernels_hash(kernels) != before


@pytest.mark.parametrize(
    "name",
    [
        "bench/results/lstm-h200.json",
        "bench/report.py",
        "__pycache__/walk.py",
        "lstm/__pycache__/walk.cpython-311.pyc",
        "README.md",
    ],
)
def test_the_hash_ignores_files_that_are_not_kernels(name: str, kernels: Path) -> None:
    before = kernels_hash(kernels)
    write(kernels / name, "otherwise")
    assert kernels_hash(kernels) == before


def test_the_hash_does_not_depend_on_the_folder(kernels: Path, tmp_path: Path) -> None:
    before = kernels_hash(kernels)
    assert kernels_hash(kernels.rename(tmp_path / "bench")) == before


@pytest.mark.parametrize(
    "text",
    [None, '{"kernels": "of others"}', "{}", "[]", "<<<<<<< ours"],
    ids=["missing", "other", "without", "list", "spoilt"],
)
def test_missing_or_stale_record_prints_one_line(
    text: str | None, kernels: Path, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        write(record, text)
    (line,) = said(kernels, record, capsys).splitlines()
    assert "`make test-gpu`" in line and "commit tests/gpu/passed.json" in line


def test_current_record_prints_nothing(kernels: Path, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(record, json.dumps({"kernels": kernels_hash(kernels)}))
    assert said(kernels, record, capsys) == ""


def test_passing_run_records_kernels_device_and_counts(
    run: Callable[..., int], kernels: Path, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(PASSES + SKIPPED) == 0
    written = json.loads(record.read_text())
    assert list(written) == ["kernels", "device", "date", "versions", "passed", "skipped"]
    assert (written["kernels"], written["device"]) == (kernels_hash(kernels), "NVIDIA H200")
    assert (written["versions"]["torch"], written["passed"], written["skipped"]) == (str(torch.__version__), 1, 1)
    capsys.readouterr()
    assert said(kernels, record, capsys) == ""


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(("code", "status", "passed"), [(PASSES, 0, 2), (SKIPPED, 0, 1), (FAILS, 1, None)])
def test_tests_that_need_the_whole_gpu_count(
    code: str, status: int, passed: int | None, pytester: pytest.Pytester, kernels: Path, record: Path
) -> None:
    pytester.makepyfile(test_others=PASSES, **{Path(ALONE).stem: code})
    assert main((), pytester.path, kernels, record, workers=0) == status
    assert (json.loads(record.read_text())["passed"] if record.exists() else None) == passed


@pytest.mark.parametrize(
    ("code", "arguments", "status"),
    [(PASSES + FAILS, (), 1), (SKIPPED, (), 0), ("", (), 5), (PASSES, ("-k", "it"), 0), (PASSES, ("--stale", "-x"), 4)],
    ids=["fails", "all skipped", "no tests", "a part", "no such argument"],
)
def test_failed_partial_or_empty_run_records_nothing(
    code: str, arguments: tuple[str, ...], status: int, run: Callable[..., int], record: Path
) -> None:
    assert run(code, *arguments) == status
    assert not record.exists()


def test_run_with_pytest_addopts_records_nothing(
    run: Callable[..., int], record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k it")
    assert run(PASSES) == 0
    assert not record.exists()


def test_kernel_edited_during_the_run_is_recorded_as_it_was_before(
    run: Callable[..., int], kernels: Path, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edits = f"from pathlib import Path\n\ndef test_it(): Path({str(kernels / 'backend.py')!r}).write_text('otherwise')"
    assert run(edits) == 0
    capsys.readouterr()
    assert said(kernels, record, capsys)
