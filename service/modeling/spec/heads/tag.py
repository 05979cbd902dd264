"""A label for every step."""

from __future__ import annotations

from typing import ClassVar, Literal

from service.modeling.spec.heads.descriptor import Labelled
from service.modeling.spec.heads.fields import AnswerField, Extent


class TagHead(Labelled):
    """A label for every step: a linear layer and softmax.

    probabilities[t] = softmax(x[t] @ weight + bias); labels[t] is the most likely, and scores[t] its probability
    """

    kind: Literal["tag"]

    main_output: ClassVar[str] = "probabilities"
    choice: ClassVar[Literal["best"]] = "best"

    @property
    def score_function(self) -> Literal["softmax"]:
        return "softmax"

    def linear_outputs(self, vocabulary: int | None) -> int:
        return len(self.labels)

    def fields(self, inputs: int) -> tuple[AnswerField, ...]:
        labels = AnswerField("labels", "BYTES", "picks", Extent.STEP, labels=self.labels)
        return labels, AnswerField("scores", "FP32", "scores", Extent.STEP)
