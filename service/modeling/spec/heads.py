"""The heads of model.toml, and the tensors of each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, StrictBool, model_validator

from service.modeling.spec.activations import NONE, Activation
from service.modeling.spec.table import Count, Shapes, Size, Table

Pool = Literal["last", "first", "last_step", "mean", "max", "sum", "attention"]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_written(pools: tuple[str, ...]) -> str | list[str]:
    return pools[0] if len(pools) == 1 else list(pools)


Pools = Annotated[tuple[Pool, ...], BeforeValidator(_as_list), PlainSerializer(_as_written), Field(min_length=1)]
"""One pool, written as its name, or a list of pools."""
Labels = Annotated[tuple[str, ...], Field(min_length=1, max_length=1 << 16)]


class Labelled(Table):
    """A head that chooses among `labels`."""

    labels: Labels

    @model_validator(mode="after")
    def _labels_differ(self) -> Labelled:
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("labels must be unique")
        if len(self.labels) == 1 and not getattr(self, "multi_label", False):
            raise ValueError("labels has one label, and softmax would always choose it: add the other labels")
        return self


class HeadDense(Table):
    """A dense layer between the pool and the head's own linear layer."""

    width: Size
    activation: Activation = NONE


class PoolingHead(Table):
    """A head that pools the steps of each sequence to one vector, on which its dense layers work.

    `pool` is one pool, or several pools with joined vectors. last: the output after the whole sequence, which a backward
    direction has at the first step; first, last_step: the output at the first and at the last step; attention: the sum of the
    steps with the weights softmax(tanh(x @ weight + bias) @ query), or softmax(x @ query) without `attention_width`.
    """

    pool: Pools
    attention_width: Size | None = None
    dense: Annotated[tuple[HeadDense, ...], Field(max_length=64)] = ()

    @model_validator(mode="after")
    def _pools_are_used(self) -> PoolingHead:
        if len(set(self.pool)) != len(self.pool):
            raise ValueError("pool names a pool twice: remove one")
        if self.attention_width is not None and "attention" not in self.pool:
            raise ValueError('attention_width belongs to the pool "attention": remove it')
        return self

    def vector_width(self, inputs: int) -> int:
        """Return the width of the vector after the dense layers."""
        return self.dense[-1].width if self.dense else inputs * len(self.pool)

    def pooling_tensors(self, inputs: int) -> Shapes:
        """Return the name and shape of each tensor of the pool and the dense layers."""
        shapes: Shapes = {}
        if "attention" in self.pool:
            shapes["attention.query"] = (self.attention_width or inputs,)
        if self.attention_width is not None:
            shapes |= {"attention.weight": (inputs, self.attention_width), "attention.bias": (self.attention_width,)}
        columns = inputs * len(self.pool)
        for index, layer in enumerate(self.dense):
            shapes |= {f"dense.{index}.weight": (columns, layer.width), f"dense.{index}.bias": (layer.width,)}
            columns = layer.width
        return shapes


class ClassifyHead(PoolingHead, Labelled):
    """One label for a whole sequence: pool over time, then a linear layer and softmax.

    With `multi_label`, each label has its own probability, by the logistic function. An answer has all labels with a
    probability of at least `threshold`.
    """

    kind: Literal["classify"]
    multi_label: StrictBool = False
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return self.pooling_tensors(inputs) | _linear(self.vector_width(inputs), len(self.labels))


class TagHead(Labelled):
    """A label for every step: a linear layer and softmax."""

    kind: Literal["tag"]

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return _linear(inputs, len(self.labels))


class RegressHead(PoolingHead):
    """`outputs` numbers for a whole sequence: pool over time, then a linear layer and `activation`."""

    kind: Literal["regress"]
    outputs: Size = 1
    activation: Activation = NONE

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return self.pooling_tensors(inputs) | _linear(self.vector_width(inputs), self.outputs)


class SpanHead(Table):
    """The most likely span of steps: a linear layer to a start and an end score, softmax over the steps of each sequence."""

    kind: Literal["span"]

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return _linear(inputs, 2)


class NextHead(Table):
    """The `top` most likely tokens after the last step: a linear layer to the vocabulary and softmax."""

    kind: Literal["next"]
    top: Count = 5

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return _linear(inputs, vocabulary or 0)


class EmbedHead(PoolingHead):
    """The pooled vector after the dense layers, scaled to length 1 if `normalize` is set."""

    kind: Literal["embed"]
    normalize: StrictBool = False

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return self.pooling_tensors(inputs)


class SequenceHead(Table):
    """The vector of every step."""

    kind: Literal["sequence"]

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return {}


Head = Annotated[
    ClassifyHead | RegressHead | TagHead | SpanHead | NextHead | EmbedHead | SequenceHead, Field(discriminator="kind")
]


def _linear(inputs: int, outputs: int) -> Shapes:
    return {"weight": (inputs, outputs), "bias": (outputs,)}


HEAD_KINDS = ("classify", "regress", "tag", "span", "next", "embed", "sequence")
