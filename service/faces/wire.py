"""Bytes to values and back, for the JSON doors. All validation of what a caller sends is here; nothing here awaits."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictStr, TypeAdapter, ValidationError

from service.errors import InvalidInput, InvalidRequest, ServiceError, TooLarge, UnknownModel
from service.faces.answers import Output
from service.sequence import FEATURES, IDS, Request, Returns
from service.settings import Settings
from service.zoo.spec import ModelSpec
from service.zoo.text import Tokenizer

SHOWN_CHARACTERS = 100
"""At most this much of what a caller sent is repeated in a message."""


# The first fault is the one that is named: a million of them cost no more.
_IDS = TypeAdapter(Annotated[list[Annotated[int, Field(strict=True)]], FailFast()])
_ROW = Annotated[list[Annotated[float, Field(strict=True, allow_inf_nan=False)]], FailFast()]
_FEATURES = TypeAdapter(Annotated[list[_ROW], FailFast()])


@dataclass(frozen=True, slots=True)
class Served:
    """One version of a model as a face sees it."""

    spec: ModelSpec
    version: str
    tokenizer: Tokenizer | None


Catalog = Mapping[str, Mapping[str, Served]]
"""By name, then by version, versions rising."""


class InferBody(BaseModel):
    """Body of POST /infer."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model: StrictStr
    """Name of a served model."""
    inputs: Annotated[list[Any], Field(min_length=1)]
    """One sequence each: a string, a list of token ids, or a list of rows of floats, as the model takes them."""
    version: StrictStr | Annotated[int, Field(strict=True)] | None = None
    """The newest when left out."""
    returns: Annotated[list[Literal["embedding", "sequence"]], Field(alias="return")] = []
    """Adds to each output the pooled vector (embedding) or the vectors of every step (sequence)."""
    deadline_ms: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    """Milliseconds from arrival after which the answer is of no use."""
    priority: Annotated[int, Field(ge=-10, le=10, strict=True)] = 0
    """Higher runs sooner."""

    @classmethod
    def parse(cls, body: bytes) -> InferBody:
        """Raises InvalidRequest for what is not JSON, InvalidInput naming the first field that is wrong."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as fault:
            raise _invalid(fault.errors(include_url=False)[0]) from None


class TraceQuery(BaseModel):
    """Query of POST /debug/trace."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    turns: Annotated[int, Field(ge=1, le=1000)] = 50
    """How many turns to record of every engine."""
    seconds: Annotated[float, Field(gt=0, le=60)] = 10.0
    """How long to wait for them; what came by then is the trace."""

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> TraceQuery:
        """Raises InvalidInput naming the first parameter that is wrong."""
        try:
            return cls.model_validate(dict(query))
        except ValidationError as fault:
            raise _invalid_query(fault.errors(include_url=False)[0]) from None


class InferAnswer(BaseModel):
    """Answer of POST /infer: one output per input, in their order."""

    model: str
    version: str
    outputs: list[Output]


class ErrorBody(BaseModel):
    """Body of every error."""

    error: str
    code: str
    field: str | None = None


def served(catalog: Catalog, name: str, version: str | int | None) -> Served:
    """The model that a caller names; raises UnknownModel naming what there is."""
    versions = catalog.get(name)
    if versions is None:
        raise UnknownModel(f"unknown model {_shown(name)}: served are {', '.join(sorted(catalog))}", field="model")
    wanted = list(versions)[-1] if version is None else str(version)
    if wanted not in versions:
        raise UnknownModel(
            f"{name} has no version {_shown(wanted)}: served are {', '.join(versions)}; leave version out for the newest",
            field="version",
        )
    return versions[wanted]


def sequences(body: InferBody, model: Served, settings: Settings, arrived: float) -> tuple[Request, bytes]:
    """The request for the engine and its tensor bytes; raises InvalidInput or TooLarge naming the input at fault."""
    if len(body.inputs) > settings.max_inputs:
        raise TooLarge(
            f"{len(body.inputs)} inputs in one request and SEQSERVE_MAX_INPUTS is {settings.max_inputs}: "
            "send several requests, or raise SEQSERVE_MAX_INPUTS",
            field="inputs",
        )
    arrays = [_array(value, f"inputs[{index}]", model) for index, value in enumerate(body.inputs)]
    request = Request(
        model=model.spec.name,
        version=model.version,
        lengths=[len(array) for array in arrays],
        deadline=arrived + _deadline_ms(body, settings) / 1000,
        sent=time.monotonic(),
        priority=body.priority,
        returns=_returns(body, model.spec),
    )
    return request, b"".join(array.tobytes() for array in arrays)


def error_body(error: ServiceError) -> dict[str, str]:
    """{"error", "code"} and, where one field is at fault, "field"."""
    body = {"error": error.message, "code": error.code}
    return body | ({"field": error.field} if error.field else {})


def _returns(body: InferBody, spec: ModelSpec) -> Returns:
    """What the caller wants besides the head's answer, or what the head's answer is."""
    for name, has in (("embedding", spec.has_embedding), ("sequence", spec.has_steps)):
        if name in body.returns and not has:
            raise InvalidInput(f"{spec.name} has no {name} to return: leave it out of return", field="return")
    wanted = {*body.returns, spec.head.kind.replace("embed", "embedding")}
    return Returns(embedding="embedding" in wanted, sequence="sequence" in wanted)


def _deadline_ms(body: InferBody, settings: Settings) -> float:
    wanted = settings.default_deadline_ms if body.deadline_ms is None else body.deadline_ms
    if wanted > settings.max_deadline_ms:
        raise InvalidInput(
            f"deadline_ms is {wanted:g} and SEQSERVE_MAX_DEADLINE_MS is {settings.max_deadline_ms}: ask for less",
            field="deadline_ms",
        )
    return wanted


def _array(value: Any, field: str, model: Served) -> NDArray[Any]:
    """One input as (steps,) ids or (steps, features) rows, within every limit of the model."""
    shape = model.spec.input
    if isinstance(value, str) and model.tokenizer is not None:
        array = np.array(_text_ids(value, field, model), IDS)
    elif isinstance(value, list) and shape.features is None:
        array = _ids(value, field, model)
    elif isinstance(value, list) and shape.features is not None:
        array = _features(value, field, model, shape.features)
    else:
        raise InvalidInput(f"{field} is {_kind(value)} and {model.spec.name} takes {_taken(model)}", field=field)
    if len(array) == 0:
        raise InvalidInput(f"{field} is empty: a sequence has at least one step", field=field)
    _check_steps(len(array), field, model)
    if len(array) < model.spec.min_steps:
        said = f"{field} has {len(array)} steps and {model.spec.name} needs at least {model.spec.min_steps}: lengthen it"
        raise InvalidInput(said, field=field)
    return array


def _text_ids(text: str, field: str, model: Served) -> list[int]:
    limit = model.spec.input.max_characters
    if len(text) > limit:
        raise TooLarge(
            f"{field} has {len(text)} characters and {model.spec.name} takes at most {limit}: shorten it", field=field
        )
    assert model.tokenizer is not None
    ids = model.tokenizer.ids(text, field)
    if not ids:
        raise InvalidInput(f"{field} has no words: send a text with at least one", field=field)
    return ids


def _ids(values: list[Any], field: str, model: Served) -> NDArray[Any]:
    _check_steps(len(values), field, model)
    try:
        ids = _IDS.validate_python(values)
    except ValidationError as fault:
        at, value = _first(fault, field)
        raise InvalidInput(f"{at} is {_kind(value)} and a token id is a whole number", field=at) from None
    highest = (model.spec.input.vocabulary or 0) - 1
    if ids and not 0 <= min(ids) <= max(ids) <= highest:
        step = next(step for step, id in enumerate(ids) if not 0 <= id <= highest)
        said = f"{_shown(str(ids[step]))} and the token ids of {model.spec.name} go from 0 to {highest}"
        raise InvalidInput(f"{field}[{step}] is {said}", field=f"{field}[{step}]")
    return np.array(ids, IDS)


def _features(values: list[Any], field: str, model: Served, features: int) -> NDArray[Any]:
    _check_steps(len(values), field, model)
    try:
        rows = _FEATURES.validate_python(values)
    except ValidationError as fault:
        at, value = _first(fault, field)
        raise InvalidInput(f"{at} is {_kind(value)}: {_a_step(model)}", field=at) from None
    for step, row in enumerate(rows):
        if len(row) != features:
            at = f"{field}[{step}]"
            raise InvalidInput(f"{at} has {len(row)} numbers: {_a_step(model)}", field=at)
    array = np.array(rows, np.float64).reshape(len(rows), features)
    too_large = np.argwhere(np.abs(array) > np.finfo(FEATURES).max)
    if len(too_large):
        step, index = too_large[0]
        at = f"{field}[{step}][{index}]"
        raise InvalidInput(f"{at} is {array[step, index]:g}: {_a_step(model)}", field=at)
    return array.astype(FEATURES)


def _a_step(model: Served) -> str:
    return f"a step of {model.spec.name} is a list of {model.spec.input.features} finite float32 numbers"


def _first(fault: ValidationError, field: str) -> tuple[str, Any]:
    """Where in `field` the first fault is, and the value found there."""
    error = fault.errors(include_url=False)[0]
    return field + "".join(f"[{index}]" for index in error["loc"]), error["input"]


def _check_steps(steps: int, field: str, model: Served) -> None:
    """A list is checked before it is read: what is far too long costs nothing."""
    limit = model.spec.input.max_steps
    if steps > limit:
        raise TooLarge(
            f"{field} has {steps} steps and {model.spec.name} takes at most {limit}: "
            "shorten it, or raise input.max_steps in its model.toml",
            field=field,
        )


def _taken(model: Served) -> str:
    shape = model.spec.input
    if shape.features is not None:
        return f"a list of steps, each a list of {shape.features} finite float32 numbers"
    return "a string or a list of token ids" if model.tokenizer is not None else "a list of token ids"


def _kind(value: Any) -> str:
    """What a caller sent, in JSON's words."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, int | float):
        return _shown(str(value))
    kinds: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return kinds[type(value)]


def _shown(text: str) -> str:
    """A piece of what a caller sent, short and on one line."""
    clean = re.sub(r"[^\x20-\x7e]", "?", text[: SHOWN_CHARACTERS + 1])
    return clean if len(clean) <= SHOWN_CHARACTERS else clean[:SHOWN_CHARACTERS] + "..."


def _invalid(error: Mapping[str, Any]) -> ServiceError:
    if error["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {_shown(str(error['msg']))}")
    if not error["loc"]:
        return InvalidRequest('the body is not an object: send {"model": "...", "inputs": [...]}')
    name, *rest = error["loc"]
    field = _shown(str(name)) + "".join(f"[{part}]" for part in rest if isinstance(part, int))
    if error["type"] == "extra_forbidden":
        known = ", ".join(info.alias or key for key, info in InferBody.model_fields.items())
        return InvalidInput(f"{field} is no option of /infer: known are {known}", field=field)
    if error["type"] == "missing":
        return InvalidInput(f"{field} is missing: the body needs model and inputs", field=field)
    return InvalidInput(f"{field}: {error['msg'][0].lower()}{error['msg'][1:]}", field=field)


def _invalid_query(error: Mapping[str, Any]) -> ServiceError:
    field = _shown(str(error["loc"][0]))
    if error["type"] == "extra_forbidden":
        known = ", ".join(TraceQuery.model_fields)
        return InvalidInput(f"{field} is no parameter of /debug/trace: known are {known}", field=field)
    return InvalidInput(f"{field} is {_shown(str(error['input']))}: {error['msg'][0].lower()}{error['msg'][1:]}", field=field)
