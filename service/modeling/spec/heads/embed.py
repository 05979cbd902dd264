"""A vector for a whole sequence."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import StrictBool

from service.modeling.spec.heads.descriptor import PoolingHead
from service.modeling.spec.heads.fields import AnswerField


class EmbedHead(PoolingHead):
    """The pooled vector after the dense layers, scaled to length 1 if `normalize` is set."""

    kind: Literal["embed"]
    normalize: StrictBool = False

    main_output: ClassVar[str] = "embedding"
    answer_vector: ClassVar[Literal["embedding"]] = "embedding"

    @property
    def score_function(self) -> Literal["unit_length"] | None:
        return "unit_length" if self.normalize else None

    def fields(self, inputs: int) -> tuple[AnswerField, ...]:
        return (AnswerField("embedding", "FP32", "embedding", width=self.vector_width(inputs)),)
