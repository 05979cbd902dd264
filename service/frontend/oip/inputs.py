"""The input tensors of an Open Inference Protocol request as sequences laid end to end. `checked` says what a model takes.

Rows stand in a tensor in one of three forms: alone; padded to the longest, with `lengths`; or end to end, with `offsets`. What is padding
goes no further than this.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidInput
from service.frontend import validation
from service.frontend.oip import metadata
from service.frontend.oip.metadata import LENGTHS, OFFSETS
from service.frontend.oip.tensors import BYTES, Tensor, wrong
from service.frontend.rest import schemas
from service.frontend.served_model import ServedModel
from service.ipc.messages import IDS
from service.settings import Settings

Array = NDArray[Any]

TAKEN = {"inputs": ("FP32", "FP16", "BF16", "FP64"), "text": (BYTES,)}
"""Datatypes of an input; all others are whole numbers."""
WHOLE = ("INT32", "INT64")


class Laid(NamedTuple):
    """values: (steps, features) or (steps,), as the engine has them, rows end to end."""

    values: Array
    lengths: list[int]


class Given:
    """The inputs of one request by name, of which exactly one has the values. `ragged`: its rows are laid end to end."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        """Raises InvalidInput for two of one name."""
        self._tensors: dict[str, Tensor] = {}
        for tensor in inputs:
            if tensor.name in self._tensors:
                raise wrong(tensor.name, "is given twice: send it once")
            self._tensors[tensor.name] = tensor
        self.ragged = OFFSETS in self._tensors

    def field_of(self, row: int) -> str:
        """How an error names a row."""
        return f"{self._values_name()}[{row}]"

    def laid(self, model: ServedModel, settings: Settings) -> Laid:
        """All rows, as the model takes them; raises InvalidInput or TooLarge naming the input at fault."""
        self._check_names(model)
        values = self._tensors[self._values_name()]
        lengths, offsets = self._tensors.get(LENGTHS), self._tensors.get(OFFSETS)
        if lengths is not None and offsets is not None:
            raise wrong(LENGTHS, "and offsets are both given: send lengths with padded rows, offsets with rows end to end")
        if values.datatype == BYTES:
            if lengths is not None or offsets is not None:
                raise wrong(LENGTHS if offsets is None else OFFSETS, "is said of steps and text has none: leave it out")
            return self._texts(values, model, settings)
        rows = _rows(values, model)
        schemas.check_rows(len(rows) if offsets is None else offsets.shape[-1] - 1, settings, values.name)
        flat, steps = _ragged(values, rows, offsets) if offsets is not None else _padded(rows, lengths)
        for row, count in enumerate(steps):
            validation.check_steps(count, self.field_of(row), model)
        read = validation.ids if model.spec.input.features is None else validation.features
        return Laid(read(flat, _place(values.name, steps), model), steps)

    def _values_name(self) -> str:
        return next((name for name in ("text", "ids", "inputs") if name in self._tensors), "inputs")

    def _check_names(self, model: ServedModel) -> None:
        """Whether these are inputs of the model, of datatypes that it takes, and one of them has the values."""
        known = [port.name for port in metadata.inputs(model.spec)]
        for name, tensor in self._tensors.items():
            if name not in known:
                raise wrong(name, f"is no input of {model.spec.name}: known are {', '.join(known)}")
            taken = TAKEN.get(name, WHOLE)
            if tensor.datatype not in taken:
                raise wrong(name, f"is {tensor.datatype}: send it as {' or '.join(taken)}")
        values = [name for name in known if name not in (LENGTHS, OFFSETS)]
        found = [name for name in values if name in self._tensors]
        if not found:
            raise wrong(values[0], f"is missing: {model.spec.name} needs {' or '.join(values)}")
        if len(found) > 1:
            raise wrong(found[1], f"and {found[0]} are both given: send one of them")

    def _texts(self, text: Tensor, model: ServedModel, settings: Settings) -> Laid:
        assert isinstance(text.values, list)
        if text.shape not in ((len(text.values),), (len(text.values), 1)):
            raise wrong(text.name, f"has the shape {list(text.shape)}: send [rows] or [rows, 1]")
        schemas.check_rows(len(text.values), settings, text.name)
        found: list[list[int]] = []
        for row, element in enumerate(text.values):
            field = self.field_of(row)
            found.append(validation.text_ids(_decoded(element, field), field, model))
            validation.check_steps(len(found[-1]), field, model)
        return Laid(np.concatenate([np.array(ids, IDS) for ids in found]), [len(ids) for ids in found])


def _rows(values: Tensor, model: ServedModel) -> Array:
    """The values as (rows, steps) or (rows, steps, features)."""
    assert not isinstance(values.values, list)
    features = model.spec.input.features
    step = () if features is None else (features,)
    array = values.values[None] if len(values.shape) == 1 + len(step) else values.values
    if array.ndim != 2 + len(step) or array.shape[2:] != step:
        forms = [f"[{', '.join((*form, *map(str, step)))}]" for form in (("steps",), ("rows", "steps"))]
        raise wrong(values.name, f"has the shape {list(values.shape)}: {model.spec.name} takes {' or '.join(forms)}")
    return array


def _padded(rows: Array, lengths: Tensor | None) -> tuple[Array, list[int]]:
    """The steps of all rows without their padding, and how many each has."""
    count, longest = rows.shape[:2]
    if lengths is None:
        return rows.reshape(-1, *rows.shape[2:]), [longest] * count
    if lengths.shape not in ((count,), (count, 1)):
        raise wrong(LENGTHS, f"has the shape {list(lengths.shape)} and there are {count} rows: send [{count}] or [{count}, 1]")
    steps = _whole(lengths)
    for row in np.flatnonzero((steps < 1) | (steps > longest))[:1]:
        field = f"{LENGTHS}[{row}]"
        raise InvalidInput(f"{field} is {steps[row]} and the rows go from 1 to {longest} steps: send one of these", field=field)
    return rows[np.arange(longest) < steps[:, None]], steps.tolist()


def _ragged(values: Tensor, rows: Array, offsets: Tensor) -> tuple[Array, list[int]]:
    """The steps of all rows, which lie end to end already, and how many each has."""
    if len(rows) > 1:
        raise wrong(values.name, f"has {len(rows)} rows, and with offsets they lie in one: send [1, steps], or lengths")
    if len(offsets.shape) > 2 or offsets.shape[:-1] not in ((), (1,)) or offsets.shape[-1] < 2:
        raise wrong(OFFSETS, f"has the shape {list(offsets.shape)}: send [rows + 1] or [1, rows + 1]")
    bounds, steps = _whole(offsets), rows.shape[1]
    if bounds[0] != 0 or bounds[-1] != steps:
        said = f"go from {bounds[0]} to {bounds[-1]} and {values.name} has {steps} steps: begin with 0, end with {steps}"
        raise wrong(OFFSETS, said)
    for row in np.flatnonzero(bounds[1:] <= bounds[:-1])[:1]:
        field = f"{OFFSETS}[{row + 1}]"
        said = f"{field} is {bounds[row + 1]} and the row begins at {bounds[row]}: a row has at least one step"
        raise InvalidInput(said, field=field)
    return rows[0], np.diff(bounds).tolist()


def _whole(tensor: Tensor) -> Array:
    assert not isinstance(tensor.values, list)
    return tensor.values.reshape(-1)


def _place(name: str, lengths: list[int]) -> validation.Place:
    """Row and step of a step of all."""
    begins = [0, *accumulate(lengths)]

    def place(step: int) -> str:
        row = bisect_right(begins, step) - 1
        return f"{name}[{row}][{step - begins[row]}]"

    return place


def _decoded(element: bytes, field: str) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as fault:
        raise InvalidInput(f"{field} is not UTF-8 at byte {fault.start}: encode it so", field=field) from None
