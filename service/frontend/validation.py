"""One sequence of a caller's as the engine has it: (steps,) token ids or (steps, features) numbers, within every limit of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import FailFast, Field, TypeAdapter, ValidationError

from service.errors import InvalidInput, TooLarge
from service.frontend.served_model import ServedModel
from service.frontend.wording import kind, shown
from service.ipc.messages import FEATURES, IDS

Place = Callable[[int], str]
"""How an error names a step of those in an array, or one of several inputs."""

# The first fault is the one that is named: a million of them cost no more.
_IDS = TypeAdapter(Annotated[list[Annotated[int, Field(strict=True)]], FailFast()])
_ROW = Annotated[list[Annotated[float, Field(strict=True, allow_inf_nan=False)]], FailFast()]
_FEATURES = TypeAdapter(Annotated[list[_ROW], FailFast()])


def array(value: Any, field: str, model: ServedModel) -> NDArray[Any]:
    """One input as (steps,) ids or (steps, features) rows, within every limit of the model."""
    shape = model.spec.input
    if isinstance(value, bytes):
        found = _raw(value, field, model)
    elif isinstance(value, str) and model.tokenizer is not None:
        found = np.array(text_ids(value, field, model), IDS)
    elif isinstance(value, list) and shape.features is None:
        found = _ids(value, field, model)
    elif isinstance(value, list) and shape.features is not None:
        found = _features(value, field, model, shape.features)
    else:
        raise InvalidInput(f"{field} is {kind(value)} and {model.spec.name} takes {_taken(model)}", field=field)
    check_steps(len(found), field, model)
    return found


def check_steps(steps: int, field: str, model: ServedModel) -> None:
    """Whether the model takes a sequence of so many steps; raises InvalidInput or TooLarge."""
    if steps == 0:
        raise InvalidInput(f"{field} is empty: a sequence has at least one step", field=field)
    _check_most(steps, field, model)
    if steps < model.spec.min_steps:
        said = f"{field} has {steps} steps and {model.spec.name} needs at least {model.spec.min_steps}: lengthen it"
        raise InvalidInput(said, field=field)


def ids(values: NDArray[Any], place: Place, model: ServedModel) -> NDArray[Any]:
    """(steps,) whole numbers as the engine has them; raises InvalidInput for one that is no token id of the model."""
    for step in np.flatnonzero((values < 0) | (values > _highest_id(model)))[:1]:
        raise _no_id(values[step], place(step), model)
    return values.astype(IDS, copy=False)


def features(values: NDArray[Any], place: Place, model: ServedModel) -> NDArray[Any]:
    """(steps, features) numbers as the engine has them; raises InvalidInput for one that a float32 cannot hold."""
    wrong = np.argwhere(~(np.abs(values) <= np.finfo(FEATURES).max))
    if len(wrong):
        step, index = wrong[0]
        at = f"{place(step)}[{index}]"
        raise InvalidInput(f"{at} is {values[step, index]:g}: {_a_step(model)}", field=at)
    return values.astype(FEATURES, copy=False)


def text_ids(text: str, field: str, model: ServedModel) -> list[int]:
    """The token ids of a text, for a model that takes one; raises InvalidInput or TooLarge."""
    limit = model.spec.input.max_characters
    if len(text) > limit:
        raise TooLarge(
            f"{field} has {len(text)} characters and {model.spec.name} takes at most {limit}: shorten it", field=field
        )
    assert model.tokenizer is not None
    found = model.tokenizer.ids(text, field)
    if not found:
        raise InvalidInput(f"{field} has no words: send a text with at least one", field=field)
    return found


def _ids(values: list[Any], field: str, model: ServedModel) -> NDArray[Any]:
    _check_most(len(values), field, model)
    try:
        found = _IDS.validate_python(values)
    except ValidationError as fault:
        raise _wrong(fault, field, " and a token id is a whole number") from None
    highest = _highest_id(model)
    if found and not 0 <= min(found) <= max(found) <= highest:
        # A whole number may be one that no array of integers holds.
        step = next(step for step, id in enumerate(found) if not 0 <= id <= highest)
        raise _no_id(found[step], f"{field}[{step}]", model)
    return np.array(found, IDS)


def _highest_id(model: ServedModel) -> int:
    return (model.spec.input.vocabulary or 0) - 1


def _no_id(id: int, at: str, model: ServedModel) -> InvalidInput:
    said = f"{shown(str(id))} and the token ids of {model.spec.name} go from 0 to {_highest_id(model)}"
    return InvalidInput(f"{at} is {said}", field=at)


def _features(values: list[Any], field: str, model: ServedModel, width: int) -> NDArray[Any]:
    _check_most(len(values), field, model)
    try:
        rows = _FEATURES.validate_python(values)
    except ValidationError as fault:
        raise _wrong(fault, field, f": {_a_step(model)}") from None
    for step, row in enumerate(rows):
        if len(row) != width:
            at = f"{field}[{step}]"
            raise InvalidInput(f"{at} has {len(row)} numbers: {_a_step(model)}", field=at)
    return features(np.array(rows, np.float64).reshape(len(rows), width), _step_of(field), model)


def _raw(data: bytes, field: str, model: ServedModel) -> NDArray[Any]:
    """The values themselves, little-endian: int32 ids, or rows of float32."""
    width = model.spec.input.features
    size = 4 * (width or 1)
    if len(data) % size:
        raise InvalidInput(
            f"{field} has {len(data)} bytes and a step of {model.spec.name} has {size}: send whole steps", field=field
        )
    _check_most(len(data) // size, field, model)
    if width is None:
        return ids(np.frombuffer(data, "<i4"), _step_of(field), model)
    return features(np.frombuffer(data, "<f4").reshape(-1, width), _step_of(field), model)


def _step_of(field: str) -> Place:
    return lambda step: f"{field}[{step}]"


def _a_step(model: ServedModel) -> str:
    return f"a step of {model.spec.name} is a list of {model.spec.input.features} finite float32 numbers"


def _wrong(fault: ValidationError, field: str, meant: str) -> InvalidInput:
    """Of the first fault in `field`: where it is, what stands there, and what was meant to."""
    error = fault.errors(include_url=False)[0]
    at = field + "".join(f"[{index}]" for index in error["loc"])
    return InvalidInput(f"{at} is {kind(error['input'])}{meant}", field=at)


def _check_most(steps: int, field: str, model: ServedModel) -> None:
    """A list is checked before it is read: what is far too long costs nothing."""
    limit = model.spec.input.max_steps
    if steps > limit:
        raise TooLarge(
            f"{field} has {steps} steps and {model.spec.name} takes at most {limit}: "
            "shorten it, or raise input.max_steps in its model.toml",
            field=field,
        )


def _taken(model: ServedModel) -> str:
    shape = model.spec.input
    if shape.features is not None:
        return f"a list of steps, each a list of {shape.features} finite float32 numbers"
    return "a string or a list of token ids" if model.tokenizer is not None else "a list of token ids"
