"""Runs operators of torch on tensors: operators over weights alone for the translation, and the whole program on samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from service.importers.draft import UNFIT, ImportRefused
from service.importers.onnx.budget import Budget
from service.importers.torch_archive.calls import OperatorCall, bound

LARGEST = 1 << 26
"""Numbers of a computed tensor."""
_PURE_NAMES = """
abs add alias amax amin arange bitwise_not cat ceil chunk clamp clamp_min clone constant_pad_nd contiguous cos cumsum detach
detach_ div empty empty_like eq exp expand expand_as eye flatten flip floor floor_divide full full_like ge gt index index_select
le lift_fresh_copy linalg_vector_norm log logical_not lt matmul max maximum mean min minimum mm mul narrow ne neg new_zeros norm
norm_except_dim numpy_T ones ones_like permute pow reciprocal relu remainder repeat reshape rsqrt rsub scalar_tensor scatter_
scatter select sigmoid sin size slice sort split split_with_sizes sqrt square squeeze stack sub sum t tanh to _to_copy transpose
tril triu type_as unbind unsqueeze view _weight_norm _weight_norm_interface where zeros zeros_like
"""
PURE = frozenset(_PURE_NAMES.split())
"""Operators that only compute, by their names."""


def run(call: OperatorCall, budget: Budget) -> Any:
    """Return the result of an operator; raises ImportRefused if it is too large, without computing it."""
    arguments = {name: value for name, value in call.arguments.items() if name != "train"}
    if "train" in call.arguments:
        arguments["train"] = False
    operator = getattr(getattr(torch.ops.aten, call.name), call.overload or "default")
    try:
        with torch.inference_mode():
            count = _size(call, operator, arguments)
            if count > LARGEST:
                raise ImportRefused(f"{call.name} makes {count} numbers of constants, and the limit is {LARGEST}")
            budget.spend(count)
            return operator(**arguments)
    except (*UNFIT, AttributeError, NotImplementedError, RuntimeError) as error:
        raise ImportRefused(f"{call.name} does not fit its arguments: {str(error).splitlines()[0][:200]}") from error


class TensorMachine:
    """Runs a program on tensors. operators: the names of the operators that it may run."""

    def __init__(self, operators: frozenset[str], budget: Budget) -> None:
        self._operators = operators
        self._budget = budget

    def constant(self, name: str, tensor: Tensor) -> Any:
        return tensor

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def size(self, value: Any) -> list[int]:
        return list(value.shape)

    def number(self, value: Any) -> Any:
        return value.item()

    def operate(self, name: str, overload: str | None, positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if name not in self._operators:
            raise ImportRefused(f"the operator {name} of torch cannot be imported")
        return run(bound(name, overload, positional, named, self.is_tensor), self._budget)


def _size(call: OperatorCall, operator: Any, arguments: Mapping[str, Any]) -> int:
    """Return how many numbers an operator makes, without computing them."""
    if call.name == "_pad_packed_sequence":
        return int(arguments["data"].numel() * max(1, arguments["total_length"]))
    if call.name in ("_pack_padded_sequence", "cpu") or call.overload == "data":
        return int(sum(tensor.numel() for tensor in arguments.values() if isinstance(tensor, Tensor)))
    on_meta = tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, dict(arguments))
    results = tree_leaves(operator(**{**on_meta, **_on_meta(operator)}))
    return sum(math.prod(value.shape) for value in results if isinstance(value, Tensor))


def _on_meta(operator: Any) -> dict[str, Any]:
    """Return the arguments with which an operator that makes a tensor does not allocate it."""
    return {"device": "meta"} if any(argument.name == "device" for argument in operator._schema.arguments) else {}
