"""The codec scenario checks each operation before it times it, and compares it with its limit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kernels.bench.timing import Spread
from loadtest.__main__ import main
from loadtest.scenarios import codec
from service.frontend.oip.tensors import Tensor


def test_every_operation_is_timed_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codec", "--seconds", "0.02", "--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["what"] for record in records] == list(codec.operations())
    assert all(0 < record["p10_us"] <= record["median_us"] <= record["p90_us"] for record in records)
    assert all(record["shape"] == [64, 64] and record["repetitions"] >= 10 for record in records)
    printed = capsys.readouterr().out
    assert str(path) in printed
    assert printed.count("<= 10 us") == len(records)


def test_median_decides_whether_a_limit_is_met() -> None:
    spreads = {"read": Spread(9.5, 9.0, 12.0, 10), "write": Spread(10.5, 8.0, 12.0, 10)}
    _, read, write = codec.table(spreads)
    assert list(read) == ["read", "9.5 us (9-12)", "<= 10 us", "met"]
    assert write[-1] == "missed"


def test_wrong_codec_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(name: str, datatype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
        return Tensor(name, datatype, shape, np.zeros(shape, np.float32))

    monkeypatch.setattr(codec, "decode", wrong)
    with pytest.raises(AssertionError):
        codec.operations()
