"""The next token."""

from __future__ import annotations

from typing import ClassVar, Literal

from service.modeling.spec.heads.descriptor import HeadTable
from service.modeling.spec.heads.fields import AnswerField
from service.modeling.spec.table import Count


class NextHead(HeadTable):
    """The `top` most likely tokens after the last step: a linear layer to the vocabulary and softmax.

    probabilities = softmax(last @ weight + bias); ids and scores are the `top` largest in descending order
    """

    kind: Literal["next"]
    top: Count = 5

    main_output: ClassVar[str] = "probabilities"
    choice: ClassVar[Literal["top"]] = "top"

    @property
    def score_function(self) -> Literal["softmax"]:
        return "softmax"

    def linear_outputs(self, vocabulary: int | None) -> int:
        return vocabulary or 0

    def fields(self, inputs: int) -> tuple[AnswerField, ...]:
        return AnswerField("ids", "INT32", "picks", width=self.top), AnswerField("scores", "FP32", "scores", width=self.top)

    @property
    def pools(self) -> tuple[str, ...]:
        return ("last",)

    def check_vocabulary(self, vocabulary: int | None) -> None:
        if vocabulary is None:
            raise ValueError('a head of kind "next" needs an input of kind "text" or "ids"')
        if self.top > vocabulary:
            raise ValueError(f"head.top is {self.top} and input.vocabulary is {vocabulary}: lower head.top")
