"""Implements functions of TorchScript that work on plain numbers, texts and lists."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

LONGEST_FACTOR = 1 << 14
LARGEST_NUMBER = 1 << 62


def _bounded(calculate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a calculation that raises ValueError for integers above LARGEST_NUMBER and for long lists."""

    def bounded(first: Any, second: Any) -> Any:
        if isinstance(first, str) or isinstance(second, str):
            raise TypeError("texts have no arithmetic")
        if isinstance(first, list | tuple) or isinstance(second, list | tuple):
            sizes = [len(one) if isinstance(one, list | tuple) else abs(int(one)) for one in (first, second)]
            if max(sizes) > LONGEST_FACTOR or sizes[0] * sizes[1] > LONGEST_FACTOR:
                raise ValueError("a list is too long")
        result = calculate(first, second)
        if isinstance(result, int) and abs(result) > LARGEST_NUMBER:
            raise ValueError("a number is too large")
        return result

    return bounded


def _append(values: list[Any], item: Any) -> list[Any]:
    if len(values) > LONGEST_FACTOR:
        raise ValueError("a list is too long")
    values.append(item)
    return values


def _format(text: str, *values: Any) -> str:
    """Return the text of a message. Its values are left out: a format of the archive could ask for any width."""
    return text


ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{name: _bounded(getattr(operator, name)) for name in ("add", "sub", "mul", "floordiv", "truediv", "mod")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "and_", "or_", "not_", "getitem")},
}
"""Functions of Python's module `operator`."""
SCALARS: dict[str, Callable[..., Any]] = {
    **ARITHMETIC,
    "div": _bounded(operator.truediv),
    "floor_divide": _bounded(operator.floordiv),
    "remainder": _bounded(operator.mod),
    "__and__": lambda first, second: first and second,
    "__or__": lambda first, second: first or second,
    "__not__": operator.not_,
    "__is__": operator.is_,
    "__isnot__": operator.is_not,
    "__contains__": operator.contains,
    "__getitem__": operator.getitem,
    "select": operator.getitem,
    "slice": lambda values, start=0, end=None, step=1: values[start:end:step],
    "append": _append,
    "len": len,
    "list": list,
    "format": _format,
    "range": range,
    "__range_length": lambda start, end, step: len(range(start, end, step)),
    "__derive_index": lambda index, start, step: start + index * step,
    "min": min,
    "max": max,
    "int": int,
    "Int": int,
    "float": float,
    "Float": float,
    "bool": bool,
    "Bool": bool,
    "IntImplicit": int,
    "ScalarImplicit": lambda value: value,
    "item": lambda value: value,
    "NumToTensor": lambda value: value,
    "scalar_tensor": lambda value, **_: value,
    "tensor": lambda value, **_: value,
    "device": lambda *_: None,
    "type": lambda *_: "cpu",
    "warn": lambda *_, **__: None,
    "is_scripting": lambda: True,
}
"""By the last part of their names."""
