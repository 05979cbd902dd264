"""Defines a call of an operator of torch with its values, which the functions that translate operators receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import helper
from torch import Tensor
from torch.utils._pytree import tree_leaves

from service.importers.chain.nodes import origins_of
from service.importers.chain.reading import Reading
from service.importers.chain.signal import Signal
from service.importers.chain.values import Constant, Value
from service.importers.draft import UNFIT, Array, ImportRefused, refusing
from service.importers.onnx import operation as onnx_operation
from service.importers.onnx.operators import OPERATORS
from service.importers.torch_archive.calls import OperatorCall


@dataclass(slots=True)
class ArchiveOperation:
    """A call, and how the program is read."""

    call: OperatorCall
    reading: Reading

    def __getitem__(self, name: str) -> Any:
        return self.call[name]

    @property
    def x(self) -> Signal:
        """The first argument, as a tensor that depends on the sequence."""
        if not isinstance(self.first, Signal):
            raise ImportRefused("its first argument does not depend on the sequence as tensors of a model do")
        return self.first

    @property
    def first(self) -> Any:
        """The first argument."""
        return next(iter(self.call.arguments.values()))

    @property
    def result_shape(self) -> list[int]:
        """The shape of the result, which torch tells on a tensor without numbers."""
        return list(self.compute(torch.empty(self.x.shape, device="meta")).shape)

    @property
    def origins(self) -> frozenset[str]:
        return origins_of(value for value in tree_leaves(dict(self.call.arguments)) if isinstance(value, Constant))

    def compute(self, first: Tensor) -> Any:
        """Return what torch computes with a tensor as the first argument."""
        operator = getattr(getattr(torch.ops.aten, self.call.name), self.call.overload or "default")
        with refusing((*UNFIT, RuntimeError), "it does not fit its input", "save it again"):
            return operator(**{**self.call.arguments, next(iter(self.call.arguments)): first})

    def weights(self, name: str) -> Array:
        """Return an argument of constant weights."""
        return array_of(self.call[name], name)

    def onnx(self, operator: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Return the result of an operator of ONNX, which computes the same: a value, or a list of several."""
        values: list[Value | None] = [_value(value) for value in inputs]
        given = {name: value for name, value in attributes.items() if value is not None}
        names = [f"x{number}" for number in range(len(values))], [f"y{number}" for number in range(outputs)]
        node = helper.make_node(operator, *names, **given)
        result = OPERATORS[operator](onnx_operation.Operation(node, values, self.reading, title=self.call.name))
        return list(result) if isinstance(result, Sequence) else result


def array_of(value: Any, name: str) -> Array:
    """Return the numbers of a constant tensor."""
    if not isinstance(value, Constant) or value.array.dtype.kind != "f":
        raise ImportRefused(f"its argument {name} is no tensor of constant weights")
    return value.array.astype(np.float64 if value.array.dtype.itemsize > 4 else np.float32, copy=False)


def _value(value: Any) -> Value | None:
    """Return a value as ONNX has it, where numbers and lists are tensors."""
    if isinstance(value, int | list | tuple):
        return Constant(np.array(value, np.int64))
    return Constant(np.array(value, np.float32)) if isinstance(value, float) else value
