"""Embeddings of a lower rank: `seqserve compress --rank`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ragged import Ragged
from service.compress import Changes, compress
from service.compress.low_rank import reduce_embedding
from service.errors import ModelError
from service.modeling import spec, store
from service.modeling.encoder import Encoder
from service.modeling.spec import (
    ClassifyHead,
    ConvLayer,
    EmbeddingLayer,
    GRULayer,
    LayerNormLayer,
    LSTMLayer,
    ModelSpec,
    QRNNLayer,
    SequenceInput,
    SRULayer,
    TCNLayer,
    TextCNNLayer,
)
from service.settings import load
from tests import models

WIDTH, VOCABULARY = 6, 40
LAYERS: dict[str, Any] = {
    "lstm": LSTMLayer(kind="lstm", hidden=5, bidirectional=True, depth=2),
    "gru": GRULayer(kind="gru", hidden=4),
    "sru": SRULayer(kind="sru", hidden=5),
    "qrnn": QRNNLayer(kind="qrnn", hidden=5, window=2),
    "conv": ConvLayer(kind="conv", filters=7, width=3),
    "text_cnn": TextCNNLayer(kind="text_cnn", widths=(2, 3), filters=4, padding=2),
}


def model_of(*layers: Any) -> ModelSpec:
    return ModelSpec(
        name="model",
        precision="float32",
        input=SequenceInput(kind="ids", vocabulary=VOCABULARY, max_steps=50),
        layers=(EmbeddingLayer(kind="embedding", width=WIDTH), *layers),
        head=ClassifyHead(kind="classify", pool=("max",), labels=("a", "b")),
    )


def answers(model: ModelSpec, arrays: dict[str, Tensor]) -> Tensor:
    ids = torch.arange(30, dtype=torch.int32)
    encoder = Encoder(model, arrays, torch.device("cpu"), fold_limit_bytes=1 << 20)
    scores = encoder(Ragged(ids, torch.tensor([0, 12, 30], dtype=torch.int32))).head_output.scores
    assert scores is not None
    return scores


def with_rank(arrays: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return the arrays with an embedding of this rank."""
    left, values, right = torch.linalg.svd(arrays["layers.0.weight"], full_matrices=False)
    return arrays | {"layers.0.weight": left[:, :rank] * values[:rank] @ right[:rank]}


@pytest.mark.parametrize("kind", LAYERS)
def test_embedding_of_that_rank_keeps_every_answer(kind: str) -> None:
    model = model_of(LAYERS[kind])
    arrays = with_rank(models.weights(model, seed=0), 3)
    reduced, factors, kept = reduce_embedding(model, arrays, 3)
    assert reduced.layers[0].outputs == 3 and factors["layers.0.weight"].shape == (VOCABULARY, 3)
    assert {name: tuple(array.shape) for name, array in factors.items()} == dict(reduced.tensors())
    assert kept == pytest.approx(1)
    torch.testing.assert_close(answers(reduced, factors), answers(model, arrays), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_product_has_the_smallest_error_of_its_rank(kind: str) -> None:
    model = model_of(LAYERS[kind])
    arrays = models.weights(model, seed=0)
    reduced, factors, kept = reduce_embedding(model, arrays, 2)
    names = [name for name in arrays if arrays[name].shape != factors[name].shape and name != "layers.0.weight"]

    def product(arrays: dict[str, Tensor], width: int) -> Tensor:
        columns = [arrays[name].movedim(list(arrays[name].shape).index(width), 0).flatten(1) for name in names]
        return (arrays["layers.0.weight"] @ torch.cat(columns, dim=1)).double()

    exact = product(arrays, WIDTH)
    left, values, right = torch.linalg.svd(exact, full_matrices=False)
    best = left[:, :2] * values[:2] @ right[:2]
    if reduced.layers[1].kind not in ("conv", "text_cnn", "qrnn"):  # other sizes of these are equal to the width
        torch.testing.assert_close(product(factors, 2), best, rtol=1e-3, atol=1e-4)
    assert kept == pytest.approx((values[:2].square().sum() / values.square().sum()).item(), rel=1e-4)


def test_rank_above_that_of_the_product_is_padded_with_zeros() -> None:
    """A layer with fewer columns than the rank: the rest of the embedding is zero."""
    model = model_of(ConvLayer(kind="conv", filters=2, width=1))
    arrays = models.weights(model, seed=0)
    reduced, factors, _ = reduce_embedding(model, arrays, 4)
    assert factors["layers.0.weight"].shape == (VOCABULARY, 4) and not factors["layers.0.weight"][:, 2:].any()
    torch.testing.assert_close(answers(reduced, factors), answers(model, arrays), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layers",
    [
        (SRULayer(kind="sru", hidden=6),),
        (SRULayer(kind="sru", hidden=5, layer_norm="before"),),
        (LayerNormLayer(kind="layer_norm"), GRULayer(kind="gru", hidden=4)),
        (TCNLayer(kind="tcn", filters=WIDTH, levels=1),),
        (SRULayer(kind="sru", hidden=5, projection=4),),
    ],
    ids=[
        "a skip of the input itself",
        "a norm within the layer",
        "a norm",
        "a residual of the input itself",
        "a wide projection",
    ],
)
def test_inputs_outside_of_products_are_refused(layers: tuple[Any, ...]) -> None:
    model = model_of(*layers)
    with pytest.raises(
        ModelError, match="uses its inputs in other ways than a product with a matrix, or would lose its projection"
    ):
        reduce_embedding(model, models.weights(model, seed=0), 3)


def test_rank_of_a_model_over_features_is_refused(tmp_path: Path) -> None:
    model = models.sensors(tmp_path)
    with pytest.raises(ModelError, match="--rank needs a model over tokens, and sensors takes features"):
        reduce_embedding(model, models.weights(model, seed=0), 2)


def test_rank_that_reduces_nothing_is_refused() -> None:
    model = model_of(LAYERS["gru"])
    with pytest.raises(ModelError, match="--rank is 6 and the embedding has 6 columns: choose a lower rank"):
        reduce_embedding(model, models.weights(model, seed=0), 6)


def test_version_with_rank_and_precision_is_written(tmp_path: Path) -> None:
    models.words(tmp_path)
    folder, section = compress(load({"models": tmp_path}, {}), "words", Changes("int8", rank=4))
    written = spec.read(folder)
    assert written.layers[0].outputs == 4 and written.precision == "int8"
    assert store.read_arrays(folder, written)["layers.0.weight"].shape == (len(models.WORDS), 4)
    assert "with an embedding of rank 4 (" in section and "and precision int8." in section
