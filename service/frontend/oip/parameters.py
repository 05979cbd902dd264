"""Parameters of an inference request and of its tensors: validation and translation to the service's own options."""

from __future__ import annotations

from typing import Any

from service.errors import InvalidInput, Unsupported
from service.frontend.oip.types import InferRequest, Parameters, RequestedOutput
from service.frontend.run import validation
from service.frontend.run.catalog import ServedModel
from service.frontend.run.quoting import describe_value, quote
from service.frontend.run.session_header import resolve_session
from service.settings import Settings

_STEPS_EXPECTED = "a whole number: the steps that the sequence has before this request"


def boolean(parameters: Parameters, name: str, tensor: str = "", default: bool = False) -> bool:
    """Return a boolean parameter of the request, or of `tensor` if named; raises InvalidInput for another type."""
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise _parameter_error(name, value, "true or false", tensor)
    return value


def requested_output(name: str, parameters: Parameters, raw: bool = True) -> RequestedOutput:
    """Return an output that a client requests; raises a ServiceError that names the invalid parameter. raw: see RequestedOutput."""
    check_no_shared_memory(name, parameters)
    expected = "a whole number: how many of the best classes to return, or 0 for all scores"
    return RequestedOutput(name, _whole_number(parameters, "classification", expected, tensor=name) or 0, raw)


def check_no_shared_memory(name: str, parameters: Parameters) -> None:
    """Raise Unsupported if a tensor's parameters place its data in shared memory."""
    if any(parameter.startswith("shared_memory_") for parameter in parameters):
        raise Unsupported("shared memory is not supported: send the tensor's data in the request", field=quote(name))


def request_options(
    request: InferRequest, session: str | None, model: ServedModel, settings: Settings, within_ms: float
) -> validation.Options:
    """Return the options of a request; raises InvalidInput that names the invalid parameter.

    within_ms: upper limit of the deadline, from the transport.
    """
    parameters = request.parameters
    level = _whole_number(
        parameters, "priority", "a whole number: 1 for the highest priority, larger values for lower ones, 0 for the default"
    )
    microseconds = _whole_number(parameters, "timeout", "a whole number of microseconds, or 0 for the default deadline")
    return validation.Options(
        returns=validation.requested_returns((output.name for output in request.outputs), model.spec),
        deadline_ms=min(
            validation.resolve_deadline_ms(microseconds / 1000 if microseconds else None, settings, "parameters.timeout"),
            within_ms,
        ),
        # The service's priorities rise from -10 to 10 and default to 0. The protocol's fall from 1, and 0 is the default.
        priority=max(-10, min(10, 11 - level)) if level else 0,
        session=session,
        session_starts=None if session is None else boolean(parameters, "sequence_start"),
        session_ends=boolean(parameters, "sequence_end"),
        session_at=None if session is None else _whole_number(parameters, "sequence_steps", _STEPS_EXPECTED),
        exact_version=bool(request.version),
    )


def session_id(parameters: Parameters, header: str | None = None) -> str | None:
    """Return the session of a request, or None; raises InvalidInput for an invalid, contradictory or missing id.

    header: the session that x-session-id names.
    """
    session = resolve_session(_sequence_id(parameters), header, "parameters.sequence_id")
    if session is not None:
        return session
    for name in ("sequence_start", "sequence_end"):
        if boolean(parameters, name):
            field = f"parameters.{name}"
            raise InvalidInput(f"{field} requires sequence_id: send sequence_id, or leave {name} out", field=field)
    return None


def _sequence_id(parameters: Parameters) -> str | None:
    """Return the session that `sequence_id` names, or None; raises InvalidInput for an invalid id."""
    id = parameters.get("sequence_id")
    if type(id) is str and id:
        return validation.check_session_id(id, field="parameters.sequence_id")
    if type(id) is int and id > 0:
        return str(id)
    if id not in (None, 0, "") or type(id) in (bool, float):
        raise _parameter_error("sequence_id", id, "a positive whole number or a string; 0 or an empty string for no sequence")
    return None


def _whole_number(parameters: Parameters, name: str, expected: str, tensor: str = "") -> int | None:
    value = parameters.get(name)
    if value is None or (type(value) is int and 0 <= value < 2**63):
        return value
    raise _parameter_error(name, value, expected, tensor)


def _parameter_error(name: str, value: Any, expected: str, tensor: str = "") -> InvalidInput:
    field = f"{quote(tensor)}.parameters.{name}" if tensor else f"parameters.{name}"
    return InvalidInput(f"{field} is {describe_value(value)}: send {expected}", field=field)
