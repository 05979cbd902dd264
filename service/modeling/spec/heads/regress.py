"""Numbers for a whole sequence."""

from __future__ import annotations

from typing import ClassVar, Literal

from service.modeling.spec.activations import NONE, Activation
from service.modeling.spec.heads.descriptor import PoolingHead
from service.modeling.spec.heads.fields import AnswerField
from service.modeling.spec.table import Size


class RegressHead(PoolingHead):
    """`outputs` numbers for a whole sequence: pool over time, then a linear layer and `activation`.

    value = activation(vector @ weight + bias)
    """

    kind: Literal["regress"]
    outputs: Size = 1
    activation: Activation = NONE

    main_output: ClassVar[str] = "value"

    @property
    def score_function(self) -> Activation:
        return self.activation

    def linear_outputs(self, vocabulary: int | None) -> int:
        return self.outputs

    def fields(self, inputs: int) -> tuple[AnswerField, ...]:
        return (AnswerField("value", "FP32", "scores", width=None if self.outputs == 1 else self.outputs),)
