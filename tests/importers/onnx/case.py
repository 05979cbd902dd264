"""The table of what imports from ONNX and what is refused: each line has a graph, with which the tests prove it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnx import ModelProto


@dataclass(frozen=True)
class Case:
    """A line of the table.

    operator: of ONNX, or several that belong together; option: what is special; graph: a model that needs it; refused: what the message of
    a refusal says, or empty if the graph imports; axes: where (batch, steps, features) are in its input; reference: whether only
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
