"""The type of a tested option of ONNX. The tests import its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnx import ModelProto


@dataclass(frozen=True)
class Case:
    """A tested option.

    operator: of ONNX, or several that belong together; option: the tested option; graph: a model that needs it; refused: words of the
    refusal, or empty if the graph imports; axes: where (batch, steps, features) are in its input; reference: whether only
    onnx.reference runs it; lengths: steps of the sequences with which it is compared.
    """

    operator: str
    option: str
    graph: Callable[[], ModelProto]
    refused: str = ""
    axes: Sequence[int] | None = None
    reference: bool = False
    lengths: Sequence[int] = (7, 3, 12, 5)

    def __str__(self) -> str:
        return f"{self.operator}: {self.option}"
