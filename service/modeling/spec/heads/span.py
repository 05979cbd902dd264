"""The most likely span of steps."""

from __future__ import annotations

from typing import ClassVar, Literal

from service.modeling.spec.heads.descriptor import HeadTable
from service.modeling.spec.heads.fields import AnswerField


class SpanHead(HeadTable):
    """The most likely span of steps: a linear layer to a start and an end score, softmax over the steps of each sequence.

    first, last = softmax over t of (x[t] @ weight + bias); score = max of first[start] * last[end] over start <= end
    """

    kind: Literal["span"]

    takes_empty: ClassVar[bool] = False
    choice: ClassVar[Literal["span"]] = "span"

    def linear_outputs(self, vocabulary: int | None) -> int:
        return 2

    def fields(self, inputs: int) -> tuple[AnswerField, ...]:
        positions = (AnswerField(name, "INT32", "picks", column=column) for column, name in enumerate(("start", "end")))
        return *positions, AnswerField("score", "FP32", "scores")
