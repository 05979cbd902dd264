"""The check for enough memory before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from service.engine import build
from service.errors import NoRoom
from service.ipc.messages import ModelVersion
from service.modeling import store
from service.settings import load
from tests import models


@pytest.mark.parametrize("device, bytes_per_value", [("cpu", {}), ("cuda:0", {"float16": 2, "bfloat16": 2, "int8": 2})])
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "int8"])
def test_weights_count_as_they_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, device: str, bytes_per_value: dict[str, int]
) -> None:
    described = models.words(tmp_path).model_copy(update={"precision": precision})
    arrays = models.weights(described)
    described = store.write(tmp_path / "words" / "2", described, arrays, card="made up", tokenizer=models.tokenizer())
    version = ModelVersion("words", "2", 1, str(tmp_path / "words" / "2"), described.model_dump_json())
    engine: Any = SimpleNamespace(device=torch.device(device), weight_bytes=0, prepare=lambda load, _: load())
    needed = bytes_per_value.get(precision, 4) * sum(array.numel() for array in arrays.values())
    monkeypatch.setattr(build, "_encoder", lambda *_: "the encoder")

    def prepare(free: int) -> Any:
        monkeypatch.setattr(build, "available_bytes", lambda _: free)
        return build.prepare_model(load({"models": tmp_path}, {}), engine, version, lambda run: run())

    assert prepare(needed) == "the encoder"
    with pytest.raises(NoRoom, match=f"words version 2 needs {needed} bytes"):
        prepare(needed - 1)
