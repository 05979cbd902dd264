"""A graph of ONNX in the making."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, checker, helper, numpy_helper

from service.errors import ModelError
from service.importers.draft import Array

OPSET, IR_VERSION = 20, 9
"""The first opset with the operator Gelu, and the format version that came with it."""
MODEL_BYTES = (1 << 31) - 1
"""Protocol buffers have no larger messages."""
INPUT, LENGTHS = "input", "lengths"


class ExportedGraph:
    """Nodes and weights. Its input is (batch, steps, features), or (batch, steps) token ids.

    has_batch: whether it takes batches; a graph takes one sequence otherwise.
    """

    def __init__(self, features: int | None, *, has_batch: bool) -> None:
        self.has_batch = has_batch
        self._nodes: list[NodeProto] = []
        self._weights: list[TensorProto] = []
        self._place = ""
        self._masks: dict[tuple[int, int], str] = {}
        batch = "batch" if has_batch else 1
        shape = (batch, "steps") if features is None else (batch, "steps", features)
        self._inputs = [_info(INPUT, TensorProto.INT64 if features is None else TensorProto.FLOAT, shape)]

    @property
    def lengths(self) -> str:
        """The number of steps of each sequence of a batch, which becomes an input where a node needs it; or empty."""
        if self.has_batch and len(self._inputs) == 1:
            self._inputs.append(_info(LENGTHS, TensorProto.INT32, ("batch",)))
        return LENGTHS if self.has_batch else ""

    def start(self, place: str) -> None:
        """Name the nodes and weights that follow after a part of the model."""
        self._place = place

    def add(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Add a node; return its output, or the first of several: the others end in .1, .2, ..."""
        name = f"{self._place}.{operator}_{len(self._nodes)}"
        names = [name, *(f"{name}.{number}" for number in range(1, outputs))]
        self._nodes.append(helper.make_node(operator, inputs, names, name=name, **attributes))
        return name

    def weight(self, name: str, array: Array) -> str:
        """Add weights in float32."""
        return self._tensor(f"{self._place}.{name}", np.ascontiguousarray(array, np.float32))

    def integers(self, *numbers: int) -> str:
        """Add a list of int64."""
        return self._tensor(f"{self._place}.integers_{len(self._weights)}", np.array(numbers, np.int64))

    def number(self, value: float | int, dtype: DTypeLike = np.float32) -> str:
        """Add one number."""
        return self._tensor(f"{self._place}.number_{len(self._weights)}", np.array(value, dtype))

    def replace_padding(self, x: str, number: float, *, steps: int = 1, plus: int = 0) -> str:
        """Replace the padding after each sequence of a batch by a number.

        steps: the axis of x, (batch, steps, width) or (batch, width, steps), that counts them; plus: how many more than the lengths.
        """
        if not self.has_batch:
            return x
        if (steps, plus) not in self._masks:
            count = self.add("Gather", self.add("Shape", x), self.number(steps, np.int64), axis=0)
            positions = self.add("Range", self.number(0, np.int64), count, self.number(1, np.int64))
            lengths = self.add("Cast", self.lengths, to=TensorProto.INT64)
            lengths = self.add("Add", lengths, self.number(plus, np.int64)) if plus else lengths
            mask = self.add("Less", positions, self.add("Unsqueeze", lengths, self.integers(1)))
            self._masks[steps, plus] = self.add("Unsqueeze", mask, self.integers(3 - steps))
        return self.add("Where", self._masks[steps, plus], x, self.number(number))

    def model(self, name: str, answer: str, output: str, shape: Sequence[int | str]) -> ModelProto:
        """Return the model; raises ModelError for more weights than a file holds.

        answer: the result of the last node; output: the name that it gets; shape: of the output for one sequence.
        """
        self._nodes.append(helper.make_node("Identity", [answer], [output], name=output))
        batch = "batch" if self.has_batch else 1
        info = _info(output, TensorProto.FLOAT, (batch, *shape))
        graph = helper.make_graph(self._nodes, name, self._inputs, [info], self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="seqserve")
        model.ir_version = IR_VERSION
        if model.ByteSize() > MODEL_BYTES:
            raise ModelError(f"{name} has {model.ByteSize()} bytes of weights, and an .onnx file holds {MODEL_BYTES}")
        checker.check_model(model, full_check=True)
        return model

    def _tensor(self, name: str, array: Array) -> str:
        self._weights.append(numpy_helper.from_array(array, name))
        return name


def _info(name: str, kind: int, shape: Sequence[int | str]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)
