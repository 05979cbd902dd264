"""Checkpoints that are damaged or made to harm are refused with the reason, and nothing in them is executed."""

from __future__ import annotations

import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from service.importers.draft import ImportRefused
from tests.importers.importing import import_file

IH, HH, BIAS = "rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_ih_l0"
GOOD: dict[str, Any] = {
    IH: torch.ones(8, 3),
    HH: torch.ones(8, 2),
    BIAS: torch.ones(8),
    "rnn.bias_hh_l0": torch.ones(8),
}


class Code:
    """Touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.file),)


def written(folder: Path, content: Any) -> Path:
    file = folder / "weights.pt"
    torch.save(content, file)
    return file


def test_code_is_not_executed(tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    with pytest.raises(ImportRefused, match=r"has the object posix\.mkdir, which is code, and is not read"):
        import_file(tmp_path, written(tmp_path, {**GOOD, "extra": Code(proof)}))
    assert not proof.exists()


@pytest.mark.parametrize(
    "content, message",
    [
        ({**GOOD, IH: torch.ones(8, 3).fill_(torch.nan)}, "24 values that are not finite"),
        ({**GOOD, BIAS: torch.full((8,), torch.inf)}, "8 values that are not finite"),
        ({**GOOD, IH: torch.ones(8, 0)}, r"has the shape \(8, 0\), which has no numbers"),
        ({**GOOD, IH: torch.ones(1).expand(1 << 40, 1 << 20)}, "over 4 bytes: save it whole"),
        ({**GOOD, IH: torch.eye(8).to_sparse()}, "is a torch.sparse_coo tensor: import the dense weights"),
        ({**GOOD, IH: torch.ones(7, 3)}, "has the shape"),
        ({**GOOD, BIAS: torch.ones(9)}, r"these tensors do not make a lstm layer .* \(9,\)"),
        ({**GOOD, HH: torch.ones(8)}, "rnn has the tensors"),
        ({**GOOD, HH: torch.ones(9, 2)}, r"layers.0.0.forward.recurrent has the shape \(2, 9\)"),
        ({}, "has no tensors"),
        ({"epoch": 3}, "has no tensors"),
        ([1, 2], "has no tensors"),
        (torch.ones(3), "has no tensors"),
        ({"a": {"b": {}}}, "has no tensors"),
    ],
    ids=range(14),
)
def test_wrong_content_is_refused_by_name(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ImportRefused, match=message):
        import_file(tmp_path, written(tmp_path, content))
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("kept", [0.0, 0.99])
def test_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    for name in ("weights.pt", "weights.safetensors"):
        file = tmp_path / name
        content = written(tmp_path, GOOD).read_bytes()
        file.write_bytes(content[: int(kept * len(content))])
        with pytest.raises(ImportRefused, match=r"is no archive of torch.save|is not a complete safetensors file"):
            import_file(tmp_path, file)


def test_compressed_archive_is_refused_before_it_expands(tmp_path: Path) -> None:
    file, bomb = written(tmp_path, GOOD), tmp_path / "bomb.pt"
    with zipfile.ZipFile(file) as stored, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        for member in stored.infolist():
            packed.writestr(member.filename, stored.read(member))
        packed.writestr("weights/data/9", bytes(20 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(ImportRefused, match=r"is compressed, which torch\.save does not do"):
            import_file(tmp_path, bomb)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_legacy_pickle_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save(GOOD, tmp_path / "weights.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ImportRefused, match="save it again with a current torch"):
        import_file(tmp_path, tmp_path / "weights.pt")


@pytest.mark.parametrize("name", ["absent.pt", "."])
def test_checkpoint_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImportRefused, match="is not a file: name the checkpoint"):
        import_file(tmp_path, tmp_path / name)


def test_unknown_suffix_asks_for_the_format(tmp_path: Path) -> None:
    file = tmp_path / "weights.dat"
    file.write_bytes(written(tmp_path, GOOD).read_bytes())
    with pytest.raises(ImportRefused, match=r"the name weights\.dat does not tell the format: add --format pytorch\|keras"):
        import_file(tmp_path, file)
    assert import_file(tmp_path, file, format="pytorch")
