"""The Open Inference Protocol V2 as both of its faces have it: one request for an answer, read, run and said in tensors.

`oip_models` has what is said of models and of the service. Nothing here knows HTTP or gRPC, and neither face checks, counts or leaves out
anything that the other does not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.errors import InvalidInput, Unsupported
from service.frontend import head_outputs, inference
from service.frontend.inference import Call, Frontend
from service.frontend.oip import outputs as oip_outputs
from service.frontend.oip.inputs import Given
from service.frontend.oip.outputs import Wanted
from service.frontend.oip.tensors import Tensor
from service.frontend.rest import schemas
from service.frontend.served_model import ServedModel
from service.frontend.wording import kind, shown
from service.ipc.messages import Request
from service.settings import Settings

Parameters = Mapping[str, Any]
"""What a caller says besides, by name: a bool, an int, a float or a str each. Names that are not known are ignored."""


@dataclass(frozen=True, slots=True)
class InferRequest:
    """version: empty for the newest, or the session's own. outputs: none for all that the model's head says."""

    model: str
    version: str
    id: str
    parameters: Parameters
    inputs: list[Tensor]
    outputs: list[Wanted]


@dataclass(frozen=True, slots=True)
class InferResponse:
    """outputs: in the order in which the request names them. parameters: of a sequence, where it is."""

    model: str
    version: str
    id: str
    parameters: Parameters
    outputs: list[Tensor]


async def infer(frontend: Frontend, call: Call, request: InferRequest, within_seconds: float = math.inf) -> InferResponse:
    """The answer to a request; raises a ServiceError. within_seconds: how long the call that brought it may take, if that says so."""
    given, session = Given(request.inputs), _session(request.parameters)

    def lay(model: ServedModel) -> tuple[Request, bytes]:
        oip_outputs.check(request.outputs, model.spec)
        options = _options(request, session, model, frontend.settings, within_seconds * 1000)
        laid = given.laid(model, frontend.settings)
        if session is not None:
            schemas.check_chunk(len(laid.lengths), "parameters.sequence_id")
        return schemas.request(laid.lengths, options, model, call.arrived), laid.values.tobytes()

    model, (answer, data) = await inference.run(frontend, call, request.model, request.version or None, session, lay)
    start = time.monotonic()
    arrays = head_outputs.arrays(model.spec, answer, data, given.field_of)
    response = InferResponse(
        model=model.spec.name,
        version=model.version,
        id=request.id,
        parameters={"sequence_steps": answer.session_steps} if answer.session_steps else {},
        outputs=oip_outputs.outputs(model.spec, arrays, answer.steps, request.outputs, given.ragged),
    )
    frontend.metrics.stage_seconds.observe(time.monotonic() - start, *call.labels, "encode")
    return response


def wanted(name: str, parameters: Parameters) -> Wanted:
    """An output as a caller asks for it; raises a ServiceError naming the parameter at fault."""
    check_place(name, parameters)
    said = "0 for the scores themselves, else how many of the best labels"
    return Wanted(name, _whole(parameters, "classification", said, of=name) or 0)


def flag(parameters: Parameters, name: str, of: str = "", default: bool = False) -> bool:
    """A parameter that is true or false, of the request or of one tensor; raises InvalidInput for another."""
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise _wrong(name, value, "true or false", of)
    return value


def check_place(name: str, parameters: Parameters) -> None:
    """Whether the data of a tensor travels with it; raises Unsupported."""
    if any(one.startswith("shared_memory_") for one in parameters):
        raise Unsupported("client shared memory is not supported: send the tensor's data", field=shown(name))


def _options(
    request: InferRequest, session: str | None, model: ServedModel, settings: Settings, within_ms: float
) -> schemas.Options:
    """What the parameters say of the request as a whole; raises InvalidInput naming the one at fault."""
    parameters = request.parameters
    urgency = _whole(parameters, "priority", "1 for the most urgent, larger for what may come later, 0 for neither")
    microseconds = _whole(parameters, "timeout", "microseconds, 0 for the service's own")
    return schemas.Options(
        returns=schemas.returns((one.name for one in request.outputs), model.spec),
        deadline_ms=min(
            schemas.deadline_ms(microseconds / 1000 if microseconds else None, settings, "parameters.timeout"), within_ms
        ),
        # Ours rises with urgency, from -10 to 10, and 0 is what nobody asked for.
        priority=max(-10, min(10, 11 - urgency)) if urgency else 0,
        session=session,
        starts=None if session is None else flag(parameters, "sequence_start"),
        ends=flag(parameters, "sequence_end"),
        exactly=bool(request.version),
    )


def _session(parameters: Parameters) -> str | None:
    """The name of the session that a sequence is."""
    id = parameters.get("sequence_id")
    if type(id) is str and id:
        return schemas.session_id(id, field="parameters.sequence_id")
    if type(id) is int and id > 0:
        return str(id)
    if id not in (None, 0, "") or type(id) in (bool, float):
        raise _wrong("sequence_id", id, "a whole number from 1 or a string, 0 or an empty one for none")
    for name in ("sequence_start", "sequence_end"):
        if flag(parameters, name):
            field = f"parameters.{name}"
            raise InvalidInput(f"{field} is said of a sequence and none is named: name one with sequence_id", field=field)
    return None


def _whole(parameters: Parameters, name: str, meaning: str, of: str = "") -> int | None:
    value = parameters.get(name)
    if value is None or (type(value) is int and 0 <= value < 2**63):
        return value
    raise _wrong(name, value, f"a whole number, {meaning}", of)


def _wrong(name: str, value: Any, meant: str, of: str = "") -> InvalidInput:
    field = f"{shown(of)}.parameters.{name}" if of else f"parameters.{name}"
    return InvalidInput(f"{field} is {kind(value)}: send {meant}", field=field)
