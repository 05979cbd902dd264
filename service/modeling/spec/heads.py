"""The heads of model.toml, and the tensors of each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, model_validator

from service.modeling.spec.table import Shapes, Size, Table

Pool = Literal["last", "mean", "max"]
Labels = Annotated[tuple[str, ...], Field(min_length=2)]


class Labelled(Table):
    """A head that chooses among `labels`."""

    labels: Labels

    @model_validator(mode="after")
    def _labels_differ(self) -> Labelled:
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("labels must be unique")
        return self

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return {"weight": (inputs, len(self.labels)), "bias": (len(self.labels),)}


class ClassifyHead(Labelled):
    """One label for a whole sequence: pool over time, then a linear layer and softmax."""

    kind: Literal["classify"]
    pool: Pool


class TagHead(Labelled):
    """A label for every step: a linear layer and softmax."""

    kind: Literal["tag"]


class RegressHead(Table):
    """`outputs` numbers for a whole sequence: pool over time, then a linear layer."""

    kind: Literal["regress"]
    pool: Pool
    outputs: Size = 1

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return {"weight": (inputs, self.outputs), "bias": (self.outputs,)}


class SpanHead(Table):
    """The most likely span of steps: a linear layer to a start and an end score, softmax over the steps of each sequence."""

    kind: Literal["span"]

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return {"weight": (inputs, 2), "bias": (2,)}


class NextHead(Table):
    """The `top` most likely tokens after the last step: a linear layer to the vocabulary and softmax."""

    kind: Literal["next"]
    top: Size = 5

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return {"weight": (inputs, vocabulary or 0), "bias": (vocabulary or 0,)}


class EmbedHead(Table):
    """The pooled vector itself, scaled to length 1 if `normalize` is set."""

    kind: Literal["embed"]
    pool: Pool
    normalize: StrictBool = False

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return {}


class SequenceHead(Table):
    """The vector of every step."""

    kind: Literal["sequence"]

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        return {}


Head = Annotated[
    ClassifyHead | RegressHead | TagHead | SpanHead | NextHead | EmbedHead | SequenceHead, Field(discriminator="kind")
]
HEAD_KINDS = ("classify", "regress", "tag", "span", "next", "embed", "sequence")
