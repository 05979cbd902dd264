"""State dicts that are made to harm or make no layers are refused with the reason, and nothing in them is executed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.importers.hostile import BIAS, HH, IH, STATE_DICT, assert_refused


class Code:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("executed",)


EMPTY: list[Any] = [{}, {"epoch": 3}, [1, 2], torch.ones(3), {"a": {"b": {}}}]
REVERSE_OF_ONE_LEVEL = {
    f"rnn.weight_{side}_{level}": torch.ones(8, {"hh": 2, "ih": inputs}[side])
    for level, inputs in (("l0_reverse", 3), ("l1", 4))
    for side in ("ih", "hh")
}
WRONG: list[tuple[Any, str]] = [
    ({**STATE_DICT, "extra": Code()}, r"has the object posix\.mkdir, which is code, and is not read"),
    ({**STATE_DICT, IH: torch.ones(8, 3).fill_(torch.nan)}, "24 values that are not finite"),
    ({**STATE_DICT, BIAS: torch.full((8,), torch.inf)}, "8 values that are not finite"),
    ({**STATE_DICT, IH: torch.ones(8, 0)}, r"has the shape \(8, 0\), which has no numbers"),
    ({**STATE_DICT, IH: torch.ones(1).expand(1 << 40, 1 << 20)}, "over 4 bytes: save it whole"),
    ({**STATE_DICT, IH: torch.eye(8).to_sparse()}, "is a torch.sparse_coo tensor: import the dense weights"),
    ({**STATE_DICT, IH: torch.ones(7, 3)}, "has the shape"),
    ({**STATE_DICT, BIAS: torch.ones(9)}, r"these tensors do not make a lstm layer .* \(9,\)"),
    ({**STATE_DICT, HH: torch.ones(8)}, "rnn has the tensors"),
    (
        {**STATE_DICT, HH: torch.ones(9, 2)},
        r"recurrent \(of rnn.weight_ih_l0, rnn.weight_hh_l0, ...\) has the shape \(2, 9\)",
    ),
    ({**STATE_DICT, IH: torch.ones(8, 3, dtype=torch.int8)}, r"weight_ih_l0 \(8, 3\) of int8"),
    (
        {**STATE_DICT, IH: torch.ones(8, 3).to(torch.float8_e4m3fn)},
        "is of type torch.float8_e4m3fn, and its scale may be elsewhere",
    ),
    ({name: STATE_DICT[name] for name in (IH, HH, BIAS)}, "rnn lacks tensors: .* two biases or none, and it has"),
    ({**STATE_DICT, **REVERSE_OF_ONE_LEVEL}, "rnn lacks tensors: each level has the same in each direction"),
    *((content, "has no tensors") for content in EMPTY),
]


@pytest.mark.parametrize("content, message", WRONG, ids=range(len(WRONG)))
def test_wrong_content_is_refused_by_name(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "weights.pt")
    assert_refused(tmp_path / "weights.pt", message)


def lying(content: bytes) -> bytes:
    """Return the file with a tensor of 24 numbers that claims 2^35."""
    return content.replace(b"K\x18", b"\x8a\x05" + (1 << 35).to_bytes(5, "little"))


@pytest.mark.parametrize(
    "harm", [lambda content: content[:-9], lambda content: content[:99], lying, lambda _: b"", lambda _: b"x" * 999]
)
def test_damaged_file_of_an_older_torch_is_refused(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "weights.pt"
    torch.save(STATE_DICT, file, _use_new_zipfile_serialization=False)
    content = file.read_bytes()
    assert harm(content) != content
    file.write_bytes(harm(content))
    assert_refused(file, "is damaged")


def test_code_in_a_file_of_an_older_torch_is_not_executed(tmp_path: Path) -> None:
    torch.save({**STATE_DICT, "extra": Code()}, tmp_path / "weights.pt", _use_new_zipfile_serialization=False)
    assert_refused(tmp_path / "weights.pt", r"has the object posix\.mkdir, which is code, and is not read")
