"""Validation that REST and OIP share: the inputs of a request, its options and its limits.

An input becomes an array as the engine takes it: (steps,) token ids or (steps, features) numbers, within every limit of the model.
"""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import FailFast, Field, TypeAdapter, ValidationError

from service.errors import InvalidInput, TooLarge
from service.frontend.run.catalog import ServedModel
from service.frontend.run.quoting import describe_value, quote
from service.ipc.messages.inference import FEATURES, IDS, Request, Returns
from service.ipc.messages.sessions import RESERVED_SESSION_PREFIX
from service.modeling.spec import ModelSpec
from service.settings import Settings

FieldOf = Callable[[int], str]
"""Returns the name of an array's step, or of an input, for an error message."""
MAX_SESSION_STEPS = 2**63 - 1
"""Most steps of a session that a request can name: more fit into no message to an engine."""
_SESSION_ID = re.compile(rf"(?!{RESERVED_SESSION_PREFIX})[!-~]([ -~]{{0,126}}[!-~])?", re.ASCII)
SESSION_ID_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 128, "pattern": f"^{_SESSION_ID.pattern}$"}

# Validation stops at the first wrong element: a list with a million wrong elements costs no more than one.
SMALL_VALUES = 64
"""Up to this many numbers, Python's arithmetic is faster than NumPy's."""
MAX_SMALL_BYTES = SMALL_VALUES * np.dtype(FEATURES).itemsize
_LARGEST = float(np.finfo(FEATURES).max)
_IDS = TypeAdapter(Annotated[list[Annotated[int, Field(strict=True)]], FailFast()])
_ROW = Annotated[list[Annotated[float, Field(strict=True, allow_inf_nan=False)]], FailFast()]
_FEATURES = TypeAdapter(Annotated[list[_ROW], FailFast()])


class Options(msgspec.Struct, frozen=True):
    """What a request asks for besides its inputs, in the same form for every API. InferBody describes each option.

    `exact_version` is true when the client named a version instead of the newest.
    """

    returns: Returns
    deadline_ms: float
    priority: int = 0
    session: str | None = None
    session_starts: bool | None = None
    session_ends: bool = False
    session_at: int | None = None
    exact_version: bool = False


class PackedInputs(msgspec.Struct, frozen=True):
    """The inputs of a request as the engine takes them: the time steps of each, and their values, packed end to end. The states from which
    the sequences start follow the values in `state_bytes` bytes if the request brings them, as `RequestBlock` describes."""

    lengths: list[int]
    data: bytes | memoryview
    state_bytes: int = 0


def engine_request(packed: PackedInputs, options: Options, model: ServedModel, arrived: float) -> Request:
    """Return the engine's message for validated inputs. `arrived` is the monotonic time of arrival in seconds."""
    session, starts = options.session, options.session_starts
    if session is not None and not packed.lengths[0]:
        starts = False
    times = arrived + options.deadline_ms / 1000, time.monotonic()
    of_session = session, starts, options.session_ends, model.generation, options.exact_version
    return Request(
        *(model.spec.name, model.version, packed.lengths, *times, options.priority, options.returns, *of_session),
        state_bytes=packed.state_bytes,
        session_at=options.session_at,
    )


def requested_returns(names: Iterable[str], spec: ModelSpec) -> Returns:
    """Return which vectors the engine must return: the vectors that the client names, and the output of the head itself."""
    return _returns(frozenset(names), spec.head.answer_vector)


@lru_cache
def _returns(names: frozenset[str], answer: str | None) -> Returns:
    outputs = {*("state" if name.startswith("state.") else name for name in names), answer}
    return Returns(embedding="embedding" in outputs, sequence="sequence" in outputs, state="state" in outputs)


def resolve_deadline_ms(requested: float | None, settings: Settings, field: str = "deadline_ms") -> float:
    """Return the requested deadline, or the default for None; raises InvalidInput above the maximum."""
    if requested is None:
        return settings.default_deadline_ms
    if requested > settings.max_deadline_ms:
        raise InvalidInput(
            f"{field} is {requested:g} milliseconds and SEQSERVE_MAX_DEADLINE_MS is {settings.max_deadline_ms}: "
            "set a shorter deadline, or raise SEQSERVE_MAX_DEADLINE_MS",
            field=field,
        )
    return requested


def is_session_id(id: str) -> bool:
    """Return whether a client may choose this session id."""
    return _SESSION_ID.fullmatch(id) is not None


def check_session_id(id: str, *, field: str = "session") -> str:
    """Return the session id that a client chose; raises InvalidInput for a malformed or reserved id."""
    if not is_session_id(id):
        raise InvalidInput(
            f"{field} must be 1 to 128 printable ASCII characters without leading or trailing spaces, "
            f"and must not begin with {RESERVED_SESSION_PREFIX!r}: choose another session id",
            field=field,
        )
    return id


def check_input_count(count: int, settings: Settings, field: str = "inputs") -> None:
    """Raise TooLarge when one request has more inputs than the setting allows."""
    if count > settings.max_inputs:
        raise TooLarge(
            f"the request has {count} inputs and SEQSERVE_MAX_INPUTS is {settings.max_inputs}: "
            "send several requests, or raise SEQSERVE_MAX_INPUTS",
            field=field,
        )


def check_single_input(count: int, field: str = "inputs") -> None:
    """Raise InvalidInput when a request to a session has more than one input."""
    if count > 1:
        raise InvalidInput(
            f"the request has {count} inputs and names a session, which takes 1 at a time: send its chunks one by one",
            field=field,
        )


def pack_input(value: Any, field: str, model: ServedModel) -> bytes:
    """Return one JSON or binary input as the engine takes it, little-endian: int32 token ids, or rows of float32.

    Raises InvalidInput or TooLarge.
    """
    if isinstance(value, bytes):
        _check_bytes(value, field, model)
        return value
    spec = model.spec.input
    if isinstance(value, str) and model.tokenizer is not None:
        data = tokenize(value, field, model)
    elif isinstance(value, list) and spec.features is None:
        data = _parse_ids(value, field, model).tobytes()
    elif isinstance(value, list) and spec.features is not None:
        data = _parse_features(value, field, model, spec.features)
    else:
        raise InvalidInput(f"{field} is {describe_value(value)} and {model.spec.name} takes {_accepted(model)}", field=field)
    check_steps(len(data) // model.step_bytes, field, model)
    return data


def pack_inputs(values: list[Any], field_of: FieldOf, model: ServedModel, settings: Settings) -> PackedInputs:
    """Validate and pack the inputs of a request; raises InvalidInput or TooLarge."""
    check_input_count(len(values), settings)
    packed = [pack_input(value, field_of(index), model) for index, value in enumerate(values)]
    size = model.step_bytes
    return PackedInputs([len(data) // size for data in packed], b"".join(packed))


def with_states(packed: PackedInputs, states: Sequence[Mapping[str, Any]], field: str, model: ServedModel) -> PackedInputs:
    """Add the states from which the sequences start; raises InvalidInput.

    states: of each sequence, its states by name, each a list of numbers or a float32 array. A state that is
    missing has its usual initial value.
    """
    if len(states) != len(packed.lengths):
        raise InvalidInput(
            f"{field} has {len(states)} entries and the request has {len(packed.lengths)} sequences: send one for each",
            field=field,
        )
    widths = states_of(model, field)
    rows = []
    for index, given in enumerate(states):
        unknown = given.keys() - widths.keys()
        if unknown:
            name = quote(min(unknown))
            raise InvalidInput(
                f"{field}[{index}] has {name}, and the states of {model.spec.name} are {', '.join(widths)}", field=field
            )
        rows += [_state_numbers(given.get(name), width, f"{field}[{index}].{name}") for name, width in widths.items()]
    joined = b"".join((packed.data, *(row.tobytes() for row in rows)))
    return PackedInputs(packed.lengths, joined, len(joined) - len(packed.data))


def states_of(model: ServedModel, field: str) -> dict[str, int]:
    """Return the widths of a model's states by name; raises InvalidInput if it has none."""
    widths = model.spec.states
    if not widths:
        raise InvalidInput(
            f"{model.spec.name} has no states that a request may bring or ask for: leave {field} out", field=field
        )
    return widths


def _state_numbers(values: Any, width: int, field: str) -> NDArray[Any]:
    """Return (width,) float32, NaN for a state that the request lacks."""
    if values is None:
        return np.full(width, np.nan, FEATURES)
    try:
        numbers = np.asarray(values if isinstance(values, np.ndarray) else msgspec.convert(values, list[float]), np.float64)
    except msgspec.ValidationError:
        raise InvalidInput(f"{field} is {describe_value(values)}: send {width} numbers", field=field) from None
    if numbers.shape != (width,) or not _all_fit(numbers):
        raise InvalidInput(f"{field} has {numbers.size} numbers: send {width} finite float32 numbers", field=field)
    return numbers.astype(FEATURES)


def check_steps(steps: int, field: str, model: ServedModel) -> None:
    """Raise InvalidInput for a sequence with too few steps for the model, TooLarge for too many."""
    if steps > model.spec.input.max_steps:
        _check_max_steps(steps, field, model)
    if steps < model.min_steps:
        raise InvalidInput(
            f"{field} has {steps} steps and {model.spec.name} needs at least {model.min_steps}: send a longer sequence",
            field=field,
        )


def check_empty_chunk(starts: bool | None, ends: bool, field: str) -> None:
    """Raise InvalidInput for a chunk of a session without steps, unless it only ends an open session."""
    if starts or not ends:
        problem = f"{field} is empty: send at least one step with each chunk of a session"
        raise InvalidInput(f"{problem}, or end an open session with an empty chunk", field=field)


def engine_ids(values: NDArray[Any], field_of: FieldOf, model: ServedModel) -> NDArray[Any]:
    """Return (steps,) whole numbers as the engine's token ids; raises InvalidInput for the first id outside the vocabulary."""
    if values.size and not 0 <= values.min() <= values.max() <= _max_id(model):
        step = np.flatnonzero((values < 0) | (values > _max_id(model)))[0]
        raise _id_out_of_range(values[step], field_of(step), model)
    return values.astype(IDS, copy=False)


def engine_features(values: NDArray[Any], field_of: FieldOf, model: ServedModel) -> NDArray[Any]:
    """Return (steps, features) numbers as the engine's float32; raises InvalidInput for the first number beyond float32."""
    if not _all_fit(values):
        step, index = np.argwhere(~_fitting(values))[0]
        field = f"{field_of(step)}[{index}]"
        raise InvalidInput(f"{field} is {values[step, index]:g}: {_step_format(model)}", field=field)
    return values.astype(FEATURES, copy=False)


def _all_fit(values: NDArray[Any]) -> bool:
    """Return whether every number is finite as float32."""
    if values.size <= SMALL_VALUES and sum(map(abs, values.ravel().tolist())) <= _LARGEST:
        return True  # in a tenth of the time. NaN and infinity make the sum larger or equal to nothing
    return bool(_fitting(values).all())


def _fitting(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which numbers are finite as float32. The limit of float32 is infinite as float16."""
    fitting: NDArray[np.bool_] = np.isfinite(values) if values.itemsize <= 4 else np.abs(values) <= _LARGEST
    return fitting


def tokenize(text: str, field: str, model: ServedModel) -> bytes:
    """Return the token ids of a text as little-endian int32, for a model with a tokenizer; raises InvalidInput or TooLarge."""
    limit = model.spec.input.max_characters
    if len(text) > limit:
        raise TooLarge(
            f"{field} has {len(text)} characters and {model.spec.name} takes at most {limit}: "
            "send a shorter text, or raise input.max_steps in model.toml",
            field=field,
        )
    assert model.tokenizer is not None
    ids = model.tokenizer.packed_ids(text, field)
    if not ids and model.min_steps:
        raise InvalidInput(f"{field} has no words: send a text with at least {model.min_steps}", field=field)
    return ids


def _parse_ids(values: list[Any], field: str, model: ServedModel) -> NDArray[Any]:
    _check_max_steps(len(values), field, model)
    try:
        ids = _IDS.validate_python(values)
    except ValidationError as error:
        raise _wrong_element(error, field, " and a token id is a whole number") from None
    limit = _max_id(model)
    if ids and not 0 <= min(ids) <= max(ids) <= limit:
        # JSON integers are unbounded: an id may not fit into an array of integers, so the range check comes before the conversion.
        step = next(step for step, id in enumerate(ids) if not 0 <= id <= limit)
        raise _id_out_of_range(ids[step], f"{field}[{step}]", model)
    return np.array(ids, IDS)


def _max_id(model: ServedModel) -> int:
    return (model.spec.input.vocabulary or 0) - 1


def _id_out_of_range(id: int, field: str, model: ServedModel) -> InvalidInput:
    limits = f"the token ids of {model.spec.name} go from 0 to {_max_id(model)}"
    return InvalidInput(f"{field} is {quote(str(id))} and {limits}", field=field)


def _parse_features(values: list[Any], field: str, model: ServedModel, width: int) -> bytes:
    _check_max_steps(len(values), field, model)
    rows = _check_rows(values, field, model)
    if set(map(len, rows)) - {width}:
        step = next(step for step, row in enumerate(rows) if len(row) != width)
        at = f"{field}[{step}]"
        raise InvalidInput(f"{at} has {len(rows[step])} numbers: {_step_format(model)}", field=at)
    if len(rows) * width <= SMALL_VALUES and sum(map(abs, chain.from_iterable(rows))) <= _LARGEST:
        return array("f", chain.from_iterable(rows)).tobytes()
    numbers = np.fromiter(chain.from_iterable(rows), np.float64, len(rows) * width)
    return engine_features(numbers.reshape(len(rows), width), _field_of_step(field), model).tobytes()


def _check_rows(values: list[Any], field: str, model: ServedModel) -> list[list[float]]:
    """Return the steps as lists of floats; raises InvalidInput, which names the first wrong element."""
    try:
        return msgspec.convert(values, list[list[float]])  # in half the time of the check that can name the element
    except msgspec.ValidationError:
        pass
    try:
        return _FEATURES.validate_python(values)
    except ValidationError as error:
        raise _wrong_element(error, field, f": {_step_format(model)}") from None


def _check_bytes(data: bytes, field: str, model: ServedModel) -> None:
    """Raise InvalidInput or TooLarge for a binary input that the engine cannot take as it is."""
    width, size, allowed = model.spec.input.features, model.step_bytes, model.spec.input.max_steps
    steps, rest = divmod(len(data), size)
    if rest:
        raise InvalidInput(
            f"{field} has {len(data)} bytes and a step of {model.spec.name} has {size}: send whole steps", field=field
        )
    if not model.min_steps <= steps <= allowed:
        check_steps(steps, field, model)
    if width is None:
        engine_ids(np.frombuffer(data, IDS), _field_of_step(field), model)
    elif len(data) > MAX_SMALL_BYTES or not sum(map(abs, memoryview(data).cast("f"))) <= _LARGEST:  # as in `_all_fit`
        engine_features(np.frombuffer(data, FEATURES).reshape(-1, width), _field_of_step(field), model)


def _field_of_step(field: str) -> FieldOf:
    return lambda step: f"{field}[{step}]"


def _step_format(model: ServedModel) -> str:
    return f"a step of {model.spec.name} is a list of {model.spec.input.features} finite float32 numbers"


def _wrong_element(error: ValidationError, field: str, expected: str) -> InvalidInput:
    """Return the error for the first element of `field` with the wrong type: its position, its value and the expected type."""
    first = error.errors(include_url=False)[0]
    at = field + "".join(f"[{index}]" for index in first["loc"])
    return InvalidInput(f"{at} is {describe_value(first['input'])}{expected}", field=at)


def _check_max_steps(steps: int, field: str, model: ServedModel) -> None:
    """Raise TooLarge. Called before the elements are read: a list that is far too long costs nothing."""
    limit = model.spec.input.max_steps
    if steps > limit:
        raise TooLarge(
            f"{field} has {steps} steps and {model.spec.name} takes at most {limit}: "
            "send a shorter sequence, or raise input.max_steps in model.toml",
            field=field,
        )


def _accepted(model: ServedModel) -> str:
    spec = model.spec.input
    if spec.features is not None:
        return f"a list of steps, each a list of {spec.features} finite float32 numbers"
    return "a string or a list of token ids" if model.tokenizer is not None else "a list of token ids"
