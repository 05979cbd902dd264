"""The vector of every step."""

from __future__ import annotations

from typing import ClassVar, Literal

from service.modeling.spec.heads.descriptor import HeadTable
from service.modeling.spec.heads.fields import AnswerField, Extent


class SequenceHead(HeadTable):
    """The vector of every step."""

    kind: Literal["sequence"]

    main_output: ClassVar[str] = "sequence"
    answer_vector: ClassVar[Literal["sequence"]] = "sequence"

    def fields(self, inputs: int) -> tuple[AnswerField, ...]:
        return (AnswerField("sequence", "FP32", "sequence", Extent.STEP, inputs),)
