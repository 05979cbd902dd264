"""The options that export, and the formats that refuse them. Each has a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from service.modeling.spec import ModelSpec
from tests.modeling.random_models import model

VOCABULARY, HIDDEN = 11, 5
SEQUENCE = {"kind": "sequence"}
EMBEDDING = {"kind": "embedding", "width": 4}
RELU6_GATES = {"kind": "hard_sigmoid", "alpha": 1 / 6, "beta": 0.5}
NAMES = (
    *("none", "sigmoid", "tanh", "relu", "relu6", "selu", "gelu", "gelu_tanh", "silu", "softplus", "softsign"),
    *("hard_tanh", "exponential", "leaky_relu", "thresholded_relu", "elu", "hard_sigmoid", "clip"),
)
ACTIVATIONS: dict[str, Any] = {
    **dict(zip(NAMES, NAMES, strict=True)),
    "leaky_relu, alpha 0.25": {"kind": "leaky_relu", "alpha": 0.25},
    "thresholded_relu, alpha 0.5": {"kind": "thresholded_relu", "alpha": 0.5},
    "elu, alpha 0.5": {"kind": "elu", "alpha": 0.5},
    "hard_sigmoid, alpha 1/6": RELU6_GATES,
    "scaled_tanh, alpha 1.5, beta 0.75": {"kind": "scaled_tanh", "alpha": 1.5, "beta": 0.75},
    "clip, alpha -0.5, beta 0.25": {"kind": "clip", "alpha": -0.5, "beta": 0.25},
    "affine, alpha 0.5, beta 0.25": {"kind": "affine", "alpha": 0.5, "beta": 0.25},
}
NOWHERE = {"pytorch": "", "onnx": ""}


@dataclass(frozen=True)
class Case:
    """A tested option.

    part, option: of model.toml; layers, head: a model that has the option, over ids if its first layer is an embedding; refused: the words
    of a refusal by format; more: whether it is exported only in tests/long.
    """

    part: str
    option: str
    layers: tuple[Mapping[str, Any], ...]
    head: Mapping[str, Any] = field(default_factory=lambda: SEQUENCE)
    refused: Mapping[str, str] = field(default_factory=dict)
    more: bool = False

    def __str__(self) -> str:
        return f"{self.part}: {self.option}"

    def model(self, **changes: Any) -> ModelSpec:
        """Return the model of the case. changes: of its keys."""
        ids = VOCABULARY if self.layers[0]["kind"] == "embedding" else 0
        return model(*map(dict, self.layers), head=dict(self.head), ids=ids, name="exported", **changes)


def _layer(kind: str, option: str, refused: Mapping[str, str] | None = None, *, more: bool = False, **keys: Any) -> Case:
    """Return the case of one layer over features that answers every step."""
    return Case(kind, option, ({"kind": kind, **keys},), refused=refused or {}, more=more)


def _recurrent(kind: str, option: str, refused: Mapping[str, str] | None = None, **keys: Any) -> Case:
    return _layer(kind, option, refused, hidden=HIDDEN, **keys)


def _answering_last(kind: str, option: str, *pools: str, more: bool = False, **keys: Any) -> Case:
    """Return the case of one layer over features that answers its last output, joined to other pools."""
    table = {"kind": kind, "hidden": HIDDEN, **keys}
    return Case(kind, option, (table,), {"kind": "embed", "pool": ["last", *pools]}, more=more)


def _gated() -> Iterator[Case]:
    """Yield the cases that rnn, lstm and gru have in common."""
    for kind, merged in {"rnn": "sum", "lstm": "mean", "gru": "product"}.items():
        yield _answering_last(kind, "backward, pool last", depth=2, direction="backward")
        yield _recurrent(kind, "depth 2, bidirectional", depth=2, bidirectional=True)
        for merge in ("sum", "mean", "product"):
            options: dict[str, Any] = {"bidirectional": True, "merge": merge, "more": merge != merged}
            yield _answering_last(kind, f"merge {merge}, pools last and max", "max", **options)
        yield _recurrent(kind, "merge sum, depth 2", {"pytorch": 'merge is "sum"'}, bidirectional=True, merge="sum", depth=2)
        yield _recurrent(kind, "clip", {"pytorch": "clip is 0.5"}, clip=0.5)
        yield _recurrent(kind, "layer_norm", dict.fromkeys(NOWHERE, "layer_norm is set"), layer_norm=True)
        yield _recurrent(kind, "learned_start", {"pytorch": "learned_start is set"}, learned_start=True)


def _own_options() -> Iterator[Case]:
    """Yield the cases of options that only one kind of recurrent layer has."""
    yield _recurrent("rnn", "activation relu", activation="relu")
    yield _recurrent("rnn", "activation softsign", {"pytorch": "activation is softsign"}, activation="softsign")
    fixed = {"pytorch": "its activations are not sigmoid and tanh"}
    for kind in ("lstm", "gru"):
        yield _recurrent(kind, "gate_activation hard_sigmoid, alpha 1/6", fixed, gate_activation=RELU6_GATES)
        yield _recurrent(kind, "activation relu, bidirectional", fixed, activation="relu", bidirectional=True)
    yield _recurrent("lstm", "output_activation softsign", {"pytorch": "output_activation"}, output_activation="softsign")
    yield _recurrent("lstm", "peepholes", {"pytorch": "peepholes is set"}, peepholes=True)
    projected = {"onnx": "projection is 2"}
    yield _recurrent("lstm", "projection, depth 2, bidirectional", projected, projection=2, depth=2, bidirectional=True)
    yield _recurrent("gru", "reset_after false", {"pytorch": "reset_after is false"}, reset_after=False)


def _scans() -> Iterator[Case]:
    elsewhere = {"onnx": "has no operator like it"}
    both = {"pytorch": "it runs in both directions", **elsewhere}
    yield _recurrent("sru", "depth 12", elsewhere, depth=12)
    yield _recurrent("sru", "depth 2, bidirectional", elsewhere, depth=2, bidirectional=True)
    yield _recurrent("sru", "backward", elsewhere, direction="backward")
    yield _recurrent("sru", "activation tanh", elsewhere, activation="tanh")
    yield _recurrent("sru", "cell_gates false", elsewhere, cell_gates=False)
    yield _recurrent("sru", "skip false", elsewhere, skip=False)
    yield _recurrent("sru", "scale", elsewhere, depth=2, scale=1.3)
    yield _recurrent("sru", "projection", elsewhere, depth=2, projection=2)
    projections = {"pytorch": "the projections of the directions differ", **elsewhere}
    yield _recurrent("sru", "projection, bidirectional", projections, depth=2, projection=2, bidirectional=True)
    yield _recurrent("sru", "layer_norm before", elsewhere, depth=2, layer_norm="before")
    yield _recurrent("sru", "layer_norm after", elsewhere, depth=2, layer_norm="after")
    yield _recurrent("qrnn", "pooling f", elsewhere, pooling="f")
    yield _recurrent("qrnn", "pooling fo, window 2, depth 2", elsewhere, window=2, depth=2)
    yield _recurrent("qrnn", "backward", elsewhere, window=2, direction="backward")
    yield _recurrent("qrnn", "window 3", {"pytorch": "window is 3", **elsewhere}, window=3)
    yield _recurrent("qrnn", "pooling ifo", {"pytorch": 'pooling is "ifo"', **elsewhere}, pooling="ifo")
    yield _recurrent("qrnn", "bidirectional", both, bidirectional=True)
    yield _recurrent("mingru", "depth 2", elsewhere, depth=2)
    yield _recurrent("mingru", "candidate identity", {"pytorch": 'candidate is "identity"', **elsewhere}, candidate="identity")
    yield _recurrent("mingru", "bidirectional", both, bidirectional=True)


def _convolutions() -> Iterator[Case]:
    def conv(option: str, refused: Mapping[str, str] | None = None, *, more: bool = False, **keys: Any) -> Case:
        return _layer("conv", option, refused, more=more, **{"filters": 6, "width": 3, **keys})

    for padding in ("same", "causal", "none", "same_upper", "same_lower"):
        yield conv(f"padding {padding}", padding=padding, width=4, more=padding == "none")
        yield conv(f"padding {padding}, stride 2", padding=padding, stride=2, more=not padding.startswith("same_"))
        yield conv(f"padding {padding}, dilation 2", padding=padding, dilation=2, more=padding != "causal")
    yield conv("pads", pads=[3, 1], stride=2)
    yield conv("groups", groups=3)
    yield conv("weight_norm", weight_norm=True)
    yield conv("batch_norm", batch_norm=True, epsilon=0.01)
    yield conv("batch_norm and weight_norm", batch_norm=True, weight_norm=True)
    for name in ("affine, alpha 0.5, beta 0.25", "elu, alpha 0.5", "gelu_tanh"):
        yield conv(f"activation {name}", activation=ACTIVATIONS[name])
    yield conv("activation glu", activation="glu")
    yield conv("activation gated_tanh", activation="gated_tanh", padding="causal")
    both = {"onnx": "does not run both"}
    yield conv("padding same_upper, stride 2, dilation 2", both, padding="same_upper", stride=2, dilation=2)
    dense = {"kind": "dense", "width": 4}

    def pool(option: str, *, more: bool = False, **keys: Any) -> Case:
        return Case("pool", option, (dense, {"kind": "pool", "width": 3, **keys}), more=more)

    for reduce in ("max", "mean"):
        for padding in ("none", "same", "causal", "same_upper"):
            is_more = padding not in ("same_upper", {"max": "causal", "mean": "same"}[reduce])
            yield pool(f"{reduce}, padding {padding}, stride 2", reduce=reduce, stride=2, padding=padding, more=is_more)
    yield pool("mean, count_padding", reduce="mean", pads=[1, 1], count_padding=True)
    yield pool("max, dilation 2", reduce="max", dilation=2)
    yield _layer("tcn", "3 levels", filters=4, levels=3, width=3)
    yield _layer("tcn", "width 1", filters=4, levels=2, width=1)
    yield _layer("tcn", "weight_norm", filters=4, levels=11, weight_norm=True)
    text_cnn = {"kind": "text_cnn", "widths": [3, 2, 1], "filters": 4, "padding": 2}
    yield Case("text_cnn", "padding 2", (EMBEDDING, text_cnn), {"kind": "classify", "pool": "max", "labels": ["a", "b", "c"]})


def _of_steps() -> Iterator[Case]:
    yield _layer("dense", "activation none", width=4)
    for name, activation in ACTIVATIONS.items():
        layers = {"kind": "dense", "width": 4}, {"kind": "layer_norm"}, {"kind": "activation", "activation": activation}
        yield Case("activation", name, layers)
    yield _layer("layer_norm", "epsilon", epsilon=0.01)
    yield _layer("batch_norm", "epsilon", epsilon=0.01)
    yield Case("embedding", "alone", (EMBEDDING,), {"kind": "regress", "pool": "mean"})
    several: tuple[Mapping[str, Any], ...] = (
        *(EMBEDDING, {"kind": "conv", "filters": 4, "width": 3}, {"kind": "pool", "reduce": "max", "width": 2, "stride": 2}),
        *({"kind": "gru", "hidden": 4, "bidirectional": True}, {"kind": "dense", "width": 3, "activation": "tanh"}),
    )
    yield Case(
        "several", "conv, pool, gru, dense", several, {"kind": "classify", "pool": ["max", "mean"], "labels": ["a", "b"]}
    )


def _heads() -> Iterator[Case]:
    def head(option: str, *, both: bool = True, more: bool = False, **keys: Any) -> Case:
        lstm = {"kind": "lstm", "hidden": 4, "bidirectional": both}
        return Case(f"head {keys['kind']}", option, (EMBEDDING, lstm), keys, more=more)

    labels = ["yes", "no", "perhaps"]
    for pool in ("last", "first", "last_step", "mean", "max", "sum"):
        yield head(f"pool {pool}", kind="classify", pool=pool, labels=labels)
        yield head(f"pool {pool}, one direction", kind="classify", pool=pool, labels=labels, both=False, more=pool != "first")
    convolved = (EMBEDDING, {"kind": "conv", "filters": 4, "width": 3, "padding": "causal"})
    yield Case("head next", "above a convolution", convolved, {"kind": "next"})
    yield head("pools joined", kind="classify", pool=["last", "max", "mean"], labels=labels)
    yield head("pool attention", kind="classify", pool="attention", labels=labels)
    yield head("pools attention and max", kind="embed", pool=["attention", "max"], attention_width=3)
    yield head("multi_label", kind="classify", pool="max", labels=labels, multi_label=True, threshold=0.3)
    yield head("multi_label, one label", kind="classify", pool="max", labels=["yes"], multi_label=True)
    dense = [{"width": 6, "activation": "relu"}, {"width": 3}]
    yield head("dense", kind="classify", pool="max", labels=labels, dense=dense)
    yield head("one output", kind="regress", pool="mean")
    yield head("activation softplus", kind="regress", pool="last", outputs=2, activation="softplus")
    yield head("activation sigmoid", kind="regress", pool="last", outputs=2, activation="sigmoid")
    yield head("activation sigmoid, one output", kind="regress", pool="max", activation="sigmoid")
    yield head("labels", kind="tag", labels=labels)
    yield head("start and end", kind="span")
    yield head("top", kind="next", top=3)
    yield head("pool last", kind="embed", pool="last")
    yield head("dense", kind="embed", pool="max", dense=[{"width": 3, "activation": "tanh"}])
    yield head("normalize", kind="embed", pool="mean", normalize=True)
    yield head("every step", kind="sequence")


CASES = [*_gated(), *_own_options(), *_scans(), *_convolutions(), *_of_steps(), *_heads()]
CHANGED = (
    *("conv: weight_norm", "conv: batch_norm", "conv: batch_norm and weight_norm", "tcn: weight_norm", "tcn: width 1"),
    *("conv: activation affine, alpha 0.5, beta 0.25", "activation: affine, alpha 0.5, beta 0.25", "activation: none"),
    *("batch_norm: epsilon", "head classify: multi_label, one label", "head regress: activation sigmoid, one output"),
)
"""Models that a graph of ONNX describes in another way that computes the same: norms and factors are folded, and levels are layers."""
