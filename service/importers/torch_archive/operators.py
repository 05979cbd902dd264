"""Lists every operator of torch that can be imported, by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from service.importers.torch_archive import elementwise, layers, moves, packing, recurrent
from service.importers.torch_archive.operation import ArchiveOperation

ALONG_AXIS = {"axis": "dim"}
DIRECT: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "addmm": ("Gemm", ("mat1", "mat2", "self"), {"alpha": "alpha", "beta": "beta"}),
    "embedding": ("Gather", ("weight", "indices"), {}),
    "gather": ("GatherElements", ("self", "index"), ALONG_AXIS),
    "matmul": ("MatMul", ("self", "other"), {}),
    "neg": ("Neg", ("self",), {}),
    "prelu": ("PRelu", ("self", "weight"), {}),
    "scatter": ("ScatterElements", ("self", "index", "src"), {}),
    **dict.fromkeys(("mm", "bmm"), ("MatMul", ("self", "mat2"), {})),
    **dict.fromkeys(("softmax", "_softmax"), ("Softmax", ("self",), ALONG_AXIS)),
    **dict.fromkeys(("log_softmax", "_log_softmax"), ("LogSoftmax", ("self",), ALONG_AXIS)),
}
"""Operators that ONNX has as well: the name there, and the arguments that are its inputs and attributes."""


def direct(operation: ArchiveOperation) -> Any:
    operator, inputs, attributes = DIRECT[operation.call.name.rstrip("_")]
    given = {ours: operation[name] for ours, name in attributes.items()}
    return operation.onnx(operator, *(operation.call.get(name) for name in inputs), **given)


OPERATORS: dict[str, Callable[[ArchiveOperation], Any]] = {
    **dict.fromkeys(DIRECT, direct),
    **moves.OPERATORS,
    **elementwise.OPERATORS,
    **layers.OPERATORS,
    **packing.OPERATORS,
    **recurrent.OPERATORS,
}
