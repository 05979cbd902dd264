"""The fields of a head's answer. The JSON of POST /infer, the tensors of the Open Inference Protocol and estimates of memory derive from
them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Extent(Enum):
    """How many values a field has: one line for each row, one for each time step of a row, or a number that depends on the answer."""

    ROW = "row"
    STEP = "step"
    RAGGED = "ragged"


@dataclass(frozen=True, slots=True)
class AnswerField:
    """A field of an answer: a member in JSON, and a tensor.

    source: the array of the engine's answer with the numbers. width: the numbers of a line, None for one number, which JSON has without a
    list. column: the first of them in a line of the source. labels: the strings that the numbers of BYTES choose, or the members of an
    object in JSON that has the numbers of FP32. best: the largest number of a line, or its position, in place of the numbers.
    threshold: of a ragged field, which has the positions of the numbers that reach it.
    """

    name: str
    dtype: Literal["FP32", "INT32", "BYTES"]
    source: Literal["scores", "picks", "embedding", "sequence"]
    extent: Extent = Extent.ROW
    width: int | None = None
    column: int = 0
    labels: tuple[str, ...] = ()
    best: bool = False
    threshold: float = 0.0

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of the tensor for one sequence; -1 stands for any size."""
        width = () if self.width is None else (self.width,)
        return width or (1,) if self.extent is Extent.ROW else (-1, *width)

    @property
    def has_label_scores(self) -> bool:
        """Whether the field has a score for each label."""
        return bool(self.labels) and self.dtype == "FP32"
