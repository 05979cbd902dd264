"""Translates a program: carries out its calls on signals, which record the meaning of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from service.importers.chain.nodes import origins_of
from service.importers.chain.reading import Reading
from service.importers.chain.signal import Signal
from service.importers.chain.values import Constant, FinalCell, Lengths, Order, State
from service.importers.draft import ImportRefused, named_in_refusals
from service.importers.onnx.budget import Budget
from service.importers.torch_archive.calls import bound
from service.importers.torch_archive.moves import OPERATORS as MOVES
from service.importers.torch_archive.operation import ArchiveOperation
from service.importers.torch_archive.operators import OPERATORS
from service.importers.torch_archive.packing import BatchSizes, Packed
from service.importers.torch_archive.tensors import PURE, run

DEPENDENT = (Signal, Lengths, Order, State, FinalCell, Packed, BatchSizes)
"""Values that depend on the input."""
SHARING = frozenset(MOVES) - {"cat", "clone", "flip", "gather", "index_select", "pad", "constant_pad_nd", "stack"}
"""Operators with results that share their numbers with the first argument."""


class TranslatingMachine:
    """Carries out calls on signals, and calls on constants with their numbers.

    An operator that changes a tensor in place gives it a new value, unless other tensors share its numbers.
    """

    def __init__(self, reading: Reading, budget: Budget) -> None:
        self._reading = reading
        self._budget = budget
        self._replaced: dict[int, tuple[Any, Any]] = {}
        self._shared: dict[int, Any] = {}

    def constant(self, name: str, tensor: Tensor) -> Any:
        return Constant(_array(tensor), frozenset([name]) if name else frozenset())

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, (Constant, *DEPENDENT))

    def size(self, value: Any) -> list[int]:
        value = self._current(value)
        if isinstance(value, Signal):
            return list(value.shape)
        if isinstance(value, Constant):
            return list(value.array.shape)
        if isinstance(value, Lengths | Order):
            return [self._reading.batch]
        if isinstance(value, Packed):
            return [value.steps.shape[0] * value.steps.shape[1], *value.steps.shape[2:]]
        if isinstance(value, BatchSizes):
            return [self._reading.steps]
        raise ImportRefused("it asks for the shape of initial states")

    def number(self, value: Any) -> Any:
        if not isinstance(value, Constant) or value.array.size != 1:
            raise ImportRefused("it makes a number of a tensor that depends on the sequence")
        return value.array.item()

    def operate(self, name: str, overload: str | None, positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
        positional, named = tree_map(self._current, (list(positional), dict(named)))
        call = bound(name, overload, positional, named, self.is_tensor)
        plain = name.rstrip("_") if not name.startswith("__") else name
        values = tree_leaves(list(call.arguments.values()))
        with named_in_refusals(name):
            if not any(isinstance(value, DEPENDENT) for value in values):
                return self._folded(call)
            if plain not in OPERATORS:
                raise ImportRefused(
                    "operators of this name cannot be imported: `seqserve import --layers torch_archive` lists the operators that can"
                )
            for value in values:
                if isinstance(value, Constant):
                    self._budget.spend(value.array.size)
            result = OPERATORS[plain](ArchiveOperation(call, self._reading))
        if plain != name:
            self._replace(name, values[0], result)
        elif plain in SHARING:
            self._shared |= {id(value): value for value in (values[0], *tree_leaves(result))}
        self._reading.progress += 1
        return result

    def _replace(self, name: str, old: Any, new: Any) -> None:
        """Give a tensor a new value. The old value is kept, so that no other value has its id."""
        if id(old) in self._shared:
            raise ImportRefused(
                f"{name}: it changes a tensor in place that shares its numbers with another: save it without inplace=True"
            )
        self._replaced[id(old)] = old, new

    def _current(self, value: Any) -> Any:
        """Return the new value of a tensor that was changed in place, or the value itself."""
        while id(value) in self._replaced:
            value = self._replaced[id(value)][1]
        return value

    def _folded(self, call: Any) -> Any:
        if call.name not in PURE:
            raise ImportRefused("it does not depend on the sequence, and is not computed from constants")
        origins = origins_of(value for value in tree_leaves(dict(call.arguments)) if isinstance(value, Constant))
        result = run(replace(call, arguments=tree_map(_unwrapped, dict(call.arguments))), self._budget)
        return tree_map(lambda value: Constant(_array(value), origins) if isinstance(value, Tensor) else value, result)


def _array(tensor: Tensor) -> Any:
    wide = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    return wide.detach().numpy()


def _unwrapped(value: Any) -> Any:
    """Return a constant as a tensor of torch."""
    if not isinstance(value, Constant):
        return value
    return torch.from_numpy(np.require(value.array, requirements="W") if not value.array.flags.writeable else value.array)
