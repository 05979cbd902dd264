"""Models in int8 on a GPU, which runs them in float16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from service.errors import ModelError
from service.modeling import store
from service.modeling.encoder import Encoder
from tests.modeling.reference_layers import EVERY_LAYER, Form
from tests.modeling.reference_model import reference_model
from tests.modeling.test_encoder import batch, scores

CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("form", EVERY_LAYER, ids=str)
def test_int8_model_is_the_float16_model_of_its_weights(tmp_path: Path, form: Form) -> None:
    model = reference_model(form)
    folder = tmp_path / "reference" / "1"
    described = store.write(folder, model.spec("int8"), model.arrays(), card="made up")
    arrays = store.read_arrays(folder, described)
    halves = {name: array.half() for name, array in arrays.items()}
    x = batch(model)
    x = type(x)(x.data.to(CUDA), x.offsets.to(CUDA))
    int8, float16 = Encoder(described, arrays, CUDA), Encoder(model.spec("float16"), halves, CUDA)
    assert int8.backends() == float16.backends()
    assert int8.weight_bytes() == float16.weight_bytes()
    assert torch.equal(scores(int8(x)), scores(float16(x)))


def test_weights_beyond_float16_are_refused() -> None:
    model = reference_model()
    arrays = model.arrays() | {"head.bias": torch.tensor([1.0, 1e5, 0.0])}
    with pytest.raises(ModelError, match=r"head\.bias has values above the range of float16"):
        Encoder(model.spec("int8"), arrays, CUDA)
