"""One label, or several, for a whole sequence."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictBool

from service.modeling.spec.heads.descriptor import Labelled, PoolingHead
from service.modeling.spec.heads.fields import AnswerField, Extent


class ClassifyHead(PoolingHead, Labelled):
    """One label for a whole sequence: pool over time, then a linear layer and softmax.

    scores = softmax(vector @ weight + bias)

    With `multi_label`, each label has its own probability, by the logistic function. An answer has all labels with a
    probability of at least `threshold`.
    """

    kind: Literal["classify"]
    multi_label: StrictBool = False
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5

    main_output: ClassVar[str] = "scores"

    @property
    def score_function(self) -> Literal["softmax", "sigmoid"]:
        return "sigmoid" if self.multi_label else "softmax"

    def linear_outputs(self, vocabulary: int | None) -> int:
        return len(self.labels)

    def fields(self, inputs: int) -> tuple[AnswerField, ...]:
        label = AnswerField("label", "BYTES", "scores", labels=self.labels, best=True)
        return label, AnswerField("score", "FP32", "scores", best=True), self._scores()

    def json_fields(self, inputs: int) -> tuple[AnswerField, ...]:
        if not self.multi_label:
            return self.fields(inputs)
        chosen = AnswerField("labels", "BYTES", "scores", Extent.RAGGED, labels=self.labels, threshold=self.threshold)
        return chosen, self._scores()

    def _scores(self) -> AnswerField:
        return AnswerField("scores", "FP32", "scores", width=len(self.labels), labels=self.labels)
