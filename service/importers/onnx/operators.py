"""Lists every operator that can be imported, by its name."""

from __future__ import annotations

from service.importers.onnx import arithmetic, layers, recurrent, shapes
from service.importers.onnx.shapes import Operator

OPERATORS: dict[str, Operator] = {
    **shapes.OPERATORS,
    **arithmetic.OPERATORS,
    **layers.OPERATORS,
    **recurrent.OPERATORS,
}
OF_CONSTANTS = ("ConstantOfShape", "Expand", "Shape")
"""Operators that take constants as well. Their results take no memory."""
