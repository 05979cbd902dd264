"""The heads of model.toml, a descriptor for each kind. The docstring of each has the equations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from service.modeling.spec.heads.classify import ClassifyHead
from service.modeling.spec.heads.embed import EmbedHead
from service.modeling.spec.heads.next import NextHead
from service.modeling.spec.heads.regress import RegressHead
from service.modeling.spec.heads.sequence import SequenceHead
from service.modeling.spec.heads.span import SpanHead
from service.modeling.spec.heads.tag import TagHead

__all__ = [
    "HEAD_KINDS",
    "ClassifyHead",
    "EmbedHead",
    "Head",
    "NextHead",
    "RegressHead",
    "SequenceHead",
    "SpanHead",
    "TagHead",
]
Head = Annotated[
    ClassifyHead | RegressHead | TagHead | SpanHead | NextHead | EmbedHead | SequenceHead, Field(discriminator="kind")
]
HEAD_KINDS = ("classify", "regress", "tag", "span", "next", "embed", "sequence")
