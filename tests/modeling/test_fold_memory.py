"""Whether an embedding is folded: by a rule, or as it was timed at an earlier start on the same machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from service.engine import build
from service.ipc.messages import Folding
from service.log import Log
from service.metrics import Metrics
from service.modeling import encoder, fold_memory, store
from service.modeling.encoder import ALWAYS, AUTO, NEVER, Encoder
from service.modeling.fold_memory import FoldMemory
from service.modeling.runnable_layer import EMBEDDED, FOLDED
from service.modeling.spec import ModelSpec
from service.settings import Settings
from service.supervisor.repository import Repository
from tests import models

CPU, AMPLE = torch.device("cpu"), 1 << 20
HERE = {"weights": "a digest", "device": "cpu"}


@pytest.fixture
def damaged() -> list[Path]:
    """The files that were reported as damaged."""
    return []


@pytest.fixture
def memory(tmp_path: Path, damaged: list[Path]) -> FoldMemory:
    return FoldMemory(tmp_path / "folding", damaged.append)


@pytest.fixture
def measured_faster(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Let trials with an embedding mode be the fastest. Returns the modes that are tried from then on."""

    def set_fastest(faster: str) -> list[str]:
        tried: list[str] = []

        def time_batch(made: Encoder, rows: int, steps: int) -> float:
            mode = made.backends()["layers.0"]
            tried.append(mode)
            return 1.0 if mode == faster else 2.0

        monkeypatch.setattr(Encoder, "time_batch", time_batch)
        return tried

    return set_fastest


def made(root: Path, memory: FoldMemory | None, spec: ModelSpec | None = None, limit: int = AMPLE, **rule: Any) -> Encoder:
    written = models.words(root)
    arrays = store.read_arrays(root / "words" / "1", written)
    return Encoder(written if spec is None else spec, arrays, CPU, limit, fold_memory=memory, **rule)


def test_next_start_decides_as_the_first_did(
    tmp_path: Path, memory: FoldMemory, measured_faster: Callable[[str], list[str]]
) -> None:
    measured_faster(FOLDED)
    assert made(tmp_path, memory).folding == Folding(True, "timing")
    tried = measured_faster(EMBEDDED)
    again = made(tmp_path, memory)
    assert again.folding == Folding(True, "memory") and again.backends()["layers.0"] == FOLDED
    assert not tried
    assert made(tmp_path, None).folding == Folding(False, "timing")


@pytest.mark.parametrize("name", ["device_name", "__version__"])
def test_other_circumstances_are_timed_again(
    tmp_path: Path,
    memory: FoldMemory,
    measured_faster: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    measured_faster(FOLDED)
    made(tmp_path, memory)
    measured_faster(EMBEDDED)
    monkeypatch.setattr(encoder, name, (lambda _: "another") if name == "device_name" else "another")
    assert made(tmp_path, memory).folding == Folding(False, "timing")


def test_other_weights_are_timed_again(tmp_path: Path, memory: FoldMemory, measured_faster: Callable[[str], list[str]]) -> None:
    measured_faster(FOLDED)
    first = made(tmp_path, memory).spec
    measured_faster(EMBEDDED)
    other = first.model_copy(update={"sha256": {name: digest[::-1] for name, digest in first.sha256.items()}})
    assert made(tmp_path, memory, other).folding == Folding(False, "timing")
    assert made(tmp_path, memory, first.model_copy(update={"sha256": {}})).folding == Folding(False, "timing")


@pytest.mark.parametrize(
    ("rule", "key", "limit", "folding"),
    [
        (ALWAYS, AUTO, AMPLE, Folding(True, "SEQSERVE_FOLD")),
        (NEVER, AUTO, AMPLE, Folding(False, "SEQSERVE_FOLD")),
        (NEVER, ALWAYS, AMPLE, Folding(True, "model.toml")),
        (ALWAYS, NEVER, AMPLE, Folding(False, "model.toml")),
        (ALWAYS, ALWAYS, 1, Folding(False, "SEQSERVE_FOLD_LIMIT_BYTES")),
        (AUTO, AUTO, 1, Folding(False, "SEQSERVE_FOLD_LIMIT_BYTES")),
    ],
)
def test_rule_decides_without_timing(
    tmp_path: Path,
    memory: FoldMemory,
    measured_faster: Callable[[str], list[str]],
    rule: str,
    key: str,
    limit: int,
    folding: Folding,
) -> None:
    tried = measured_faster(EMBEDDED if folding.folded else FOLDED)
    spec = models.words(tmp_path).model_copy(update={"fold": key})
    encoded = made(tmp_path, memory, spec, limit, fold=rule)
    assert encoded.folding == folding
    assert encoded.backends()["layers.0"] == (FOLDED if folding.folded else EMBEDDED)
    assert not tried


def test_layer_that_cannot_fold_says_so(tmp_path: Path) -> None:
    pool = {"kind": "pool", "reduce": "max", "width": 2}
    spec = models.made_up(tmp_path, "pooled", models.IDS, models.EMBEDDING, pool, head={"kind": "embed", "pool": "mean"})
    made = Encoder(spec, models.weights(spec), CPU, AMPLE, fold=ALWAYS)
    assert made.folding == Folding(False, "layer")


def test_first_of_several_decisions_wins(memory: FoldMemory) -> None:
    with ThreadPoolExecutor(8) as threads:
        decided = list(threads.map(lambda number: memory.remember(HERE, number % 2 == 0), range(32)))
    assert len(set(decided)) == 1 and memory.recall(HERE) == decided[0]


@pytest.mark.parametrize("content", [b"", b'{"folded": true', b'{"folded": 1, "circumstances": {}}', b"\xff\xfe", b"null"])
def test_damaged_file_is_reported_and_replaced(tmp_path: Path, memory: FoldMemory, damaged: list[Path], content: bytes) -> None:
    memory.remember(HERE, True)
    [file] = (tmp_path / "folding").iterdir()
    file.write_bytes(content)
    assert memory.recall(HERE) is None and damaged == [file]
    assert memory.remember(HERE, False) is False
    assert memory.recall(HERE) is False
    assert list((tmp_path / "folding").iterdir()) == [file]


def test_file_of_other_circumstances_is_damage(tmp_path: Path, memory: FoldMemory, damaged: list[Path]) -> None:
    memory.remember(HERE, True)
    [file] = (tmp_path / "folding").iterdir()
    file.write_bytes(file.read_bytes().replace(b"a digest", b"another"))
    assert memory.recall(HERE) is None and damaged == [file]


def test_folder_that_cannot_be_written_remembers_nothing(tmp_path: Path, damaged: list[Path]) -> None:
    (tmp_path / "file").touch()
    memory = FoldMemory(tmp_path / "file" / "folding", damaged.append)
    assert [memory.remember(HERE, folded) for folded in (True, False)] == [True, False]
    assert memory.recall(HERE) is None and not damaged


def test_full_disk_leaves_no_partial_file(tmp_path: Path, memory: FoldMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_nothing(file: Path, content: bytes) -> int:
        file.touch()
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_nothing)
    assert memory.remember(HERE, True) is True
    assert not list((tmp_path / "folding").iterdir())


def test_oldest_decisions_are_removed(tmp_path: Path, memory: FoldMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_memory, "MAX_DECISIONS", 3)
    folder, known = tmp_path / "folding", set[Path]()
    for number in range(5):
        memory.remember({"weights": str(number)}, True)
        [new] = set(folder.iterdir()) - known
        os.utime(new, (number, number))  # a coarse clock may give several files the same time
        known = set(folder.iterdir())
    assert len(known) == 3
    assert memory.recall({"weights": "4"}) is True


def test_engines_of_a_service_fold_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured_faster: Callable[[str], list[str]]
) -> None:
    """The second engine would decide otherwise by itself. The cache folder is that of the settings."""
    monkeypatch.setenv("SEQSERVE_CACHE", "replaced by the engine, and restored after the test")
    models.words(tmp_path / "models")
    settings = Settings(models=tmp_path / "models", device="cpu,cpu", cache=tmp_path / "cache")
    versions = Repository(settings.models).manifest().model_versions
    folding = []
    for place, faster in enumerate((FOLDED, EMBEDDED)):
        measured_faster(faster)
        engine = build.build_engine(versions, settings, Metrics(), Log("engine"), place=place, threads=1)
        folding.append(engine.loaded()[0].folding)
    assert folding == [Folding(True, "timing"), Folding(True, "memory")]
