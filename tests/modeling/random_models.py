"""Layers and models with random weights, and rows for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from kernels.ragged import Ragged
from service.modeling import layer_builder
from service.modeling.encoder import Encoder, Encoding
from service.modeling.runnable_layer import RunnableLayer
from service.modeling.spec import ModelSpec
from service.modeling.spec.layers import Layer
from tests.kernels import inputs
from tests.kernels.families import cpu_backends

VOCABULARY, WIDTH, HIDDEN, FEATURES = 13, 7, 5, 3
LABELS = ("near", "far", "unknown")
CPU = torch.device("cpu")
SIZES: dict[str, dict[str, Any]] = {
    "conv": {"filters": HIDDEN, "width": 3},
    "tcn": {"filters": HIDDEN, "levels": 2},
    "text_cnn": {"filters": HIDDEN, "widths": (3, 1, 4)},
}
Table = dict[str, Any]
_LAYERS: TypeAdapter[Layer] = TypeAdapter(Layer)


class Form:
    """A layer of model.toml, such as ``Form("gru", depth=2)``. Default sizes are odd."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.kind = kind
        self.options = options
        self.table = {"kind": kind, **SIZES.get(kind, {"hidden": HIDDEN}), **options}
        self.spec = _LAYERS.validate_python(self.table)

    def __str__(self) -> str:
        return "-".join([self.kind, *(f"{name}={value}" for name, value in self.options.items())])

    def also(self, **options: Any) -> Form:
        return Form(self.kind, **{**self.options, **options})

    def arrays(self, width: int = FEATURES) -> dict[str, Tensor]:
        """Return the weights of the layer over `width` columns."""
        return random_tensors(self.spec.tensors(width))

    def built(self, width: int = FEATURES, storage: torch.dtype = torch.float32) -> RunnableLayer:
        arrays = {name: array.to(storage) for name, array in self.arrays(width).items()}
        return layer_builder.build_layer(self.spec, width, arrays, CPU)

    @property
    def fastest_on_cpu(self) -> str:
        """The name of the backend that runs the layer on a CPU."""
        return cpu_backends("conv" if self.kind in ("tcn", "text_cnn") else self.kind)[0]


RECURRENT = (
    *(Form("lstm"), Form("gru"), Form("gru", reset_after=False), Form("sru"), Form("sru", skip=False)),
    Form("sru", cell_gates=False, activation="tanh", scale=1.7),
    Form("sru", projection=2, scale=-0.3),
    Form("sru", layer_norm="before", projection=2, activation="tanh"),
    Form("sru", layer_norm="after", cell_gates=False),
    *(Form("qrnn", pooling="f", window=3), Form("qrnn", pooling="fo"), Form("qrnn", pooling="ifo", window=3)),
    Form("mingru"),
    Form("mingru", candidate="identity"),
)
CONVOLUTIONS = (
    Form("conv", width=4, padding="same", activation="none"),
    Form("conv", width=3, padding="causal", dilation=3, activation="tanh"),
    Form("conv", width=3, padding="same", dilation=2, stride=2),
    Form("conv", width=2, padding="causal", stride=3),
    Form("conv", width=2, padding="none", dilation=4),
    Form("conv", width=1, activation="gelu"),
    Form("conv", padding="causal", activation="glu"),
    Form("conv", padding="causal", width=2, dilation=2, activation="gated_tanh", weight_norm=True, batch_norm=True),
)
TCNS = (Form("tcn", levels=3, width=3, filters=FEATURES), Form("tcn", levels=1, weight_norm=True))
TEXT_CNNS = (Form("text_cnn"), Form("text_cnn", widths=(2,), padding=1))
EVERY_LAYER = (*RECURRENT, *(form.also(depth=2, bidirectional=True) for form in RECURRENT), *CONVOLUTIONS, *TCNS, *TEXT_CNNS)
ONE_OF_A_KIND = tuple(map(Form, ("lstm", "gru", "sru", "qrnn", "mingru", "conv", "text_cnn")))


def model(*layers: Table | Form, head: Table | None = None, ids: int = 0, features: int = FEATURES, **keys: Any) -> ModelSpec:
    """Return a model over features, or over this many token ids. It answers every step by default."""
    sizes = {"kind": "ids", "vocabulary": ids} if ids else {"kind": "features", "features": features}
    tables = [layer.table if isinstance(layer, Form) else layer for layer in layers]
    given = {"input": {**sizes, "max_steps": 99}, "layers": tables, "head": head or {"kind": "sequence"}}
    return ModelSpec.model_validate({"name": "words", "precision": "float32", **given, **keys})


def classifier(*forms: Form, embedded: bool = True, pool: str = "max", **keys: Any) -> ModelSpec:
    """Return a model over ids with an embedding, or over features, and with labels."""
    head = {"kind": "classify", "pool": pool, "labels": LABELS}
    embedding: list[Table] = [{"kind": "embedding", "width": WIDTH}] if embedded else []
    return model(*embedding, *forms, head=head, ids=VOCABULARY if embedded else 0, **keys)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Return normal weights, scaled by the inputs of matrices, with positive variances and magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    arrays = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if name.endswith(("norm", "magnitude")):
            values = values.abs() + 0.5
        elif len(shape) > 1:
            values = values * values[..., 0].numel() ** -0.5
        arrays[name] = values
    return arrays


def random_arrays(spec: ModelSpec) -> dict[str, Tensor]:
    return random_tensors(spec.tensors())


def random_rows(lengths: Sequence[int], width: int = FEATURES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, width, generator=generator) for length in lengths]


def batch(spec: ModelSpec, lengths: Sequence[int]) -> Ragged:
    """Return rows that a model takes: ids or features."""
    return random_ids(lengths) if spec.input.vocabulary else inputs.joined(random_rows(lengths))


def random_ids(lengths: Sequence[int]) -> Ragged:
    generator = torch.Generator().manual_seed(1)
    return inputs.ragged(torch.randint(VOCABULARY, (sum(lengths),), generator=generator, dtype=torch.int32), list(lengths))


def encoder(spec: ModelSpec, **changes: Any) -> Encoder:
    return Encoder(spec.model_copy(update=changes), random_arrays(spec), CPU)


def scores(encoding: Encoding) -> Tensor:
    assert encoding.head_output.scores is not None
    return encoding.head_output.scores
