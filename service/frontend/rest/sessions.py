"""The routes of sessions: export, import, fork and close a session. Chunks go to /infer and /stream."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from msgspec import Meta
from pydantic import BaseModel

from service.access.caller import Caller
from service.frontend.rest.http_exchange import (
    MANAGEMENT_LIMIT,
    OCTET_STREAM,
    caller_of,
    cancel_on_disconnect,
    named_session,
    read_json,
    read_state,
    respond,
    respond_json,
)
from service.frontend.rest.schemas import JsonBody, SessionId, describe_body
from service.frontend.rest.state_signatures import check_signature, signed
from service.frontend.run.frontend import Frontend
from service.frontend.run.session_header import DESCRIPTION, resolve_session
from service.frontend.run.validation import SESSION_ID_SCHEMA, check_session_id
from service.ipc import session_file

STATE_PATH = "/sessions/{id:path}/state"
FORK_PATH = "/sessions/{id:path}/fork"
_ID = {"name": "id", "in": "path", "required": True, "schema": SESSION_ID_SCHEMA}
_STATE = {"schema": {"type": "string", "format": "binary"}}


class ForkBody(JsonBody):
    """Body of POST /sessions/{id}/fork."""

    endpoint = "/sessions/{id}/fork"
    example = '{"session": "..."}'

    session: Annotated[SessionId, Meta(description="Id of the copy.")]

    def __post_init__(self) -> None:
        check_session_id(self.session)


class SessionReply(BaseModel):
    """Reply of the session routes."""

    session: str


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add the routes of sessions."""

    @router.get(
        STATE_PATH,
        responses={200: {"content": {OCTET_STREAM: _STATE}}},
        openapi_extra={"parameters": [_ID, DESCRIPTION]},
    )
    async def export_state(request: Request) -> Response:
        """Export a session. Returns its state as a safetensors file, which any replica with the same model accepts. It stays open."""
        state = await cancel_on_disconnect(request, _export(frontend, caller_of(request), _id(request)))
        return respond(frontend, state, OCTET_STREAM)

    @router.put(
        STATE_PATH,
        response_model=SessionReply,
        openapi_extra={"parameters": [_ID, DESCRIPTION], "requestBody": {"required": True, "content": {OCTET_STREAM: _STATE}}},
    )
    async def import_state(request: Request) -> Response:
        """Open a session that continues from an exported state."""
        id, state = _id(request), await read_state(request, frontend)
        await cancel_on_disconnect(request, _import(frontend, caller_of(request), id, state))
        return respond_json(frontend, {"session": id})

    @router.delete(STATE_PATH, response_model=SessionReply, openapi_extra={"parameters": [_ID, DESCRIPTION]})
    async def close(request: Request) -> Response:
        """Close a session and drop its state."""
        id = _id(request)
        await cancel_on_disconnect(request, frontend.dispatcher.end_session(caller_of(request).session(id)))
        return respond_json(frontend, {"session": id})

    @router.post(
        FORK_PATH,
        response_model=SessionReply,
        openapi_extra={"parameters": [_ID, DESCRIPTION], **describe_body(ForkBody, copy={"session": "the-copy"})},
    )
    async def fork(request: Request) -> Response:
        """Open another session that continues from the current state of this session."""
        id, body = _id(request), ForkBody.parse(await read_json(request, frontend, MANAGEMENT_LIMIT))
        await cancel_on_disconnect(request, _fork(frontend, caller_of(request), id, body.session))
        return respond_json(frontend, {"session": body.session})


async def _export(frontend: Frontend, caller: Caller, id: str) -> bytes | memoryview:
    state = await frontend.dispatcher.export_session(caller.session(id))
    return await signed(frontend.access.state_keys, caller.share.tenant, state)


async def _import(frontend: Frontend, caller: Caller, id: str, state: bytes) -> None:
    """Open a session from a state. Its signature is checked before anything else of it is read."""
    frontend.limits.memory.check_new_session()
    await check_signature(frontend.access.state_keys, caller.share.tenant, state)
    await frontend.dispatcher.import_session(caller.session(id), session_file.read(state), caller.max_sessions)


async def _fork(frontend: Frontend, caller: Caller, id: str, copy: str) -> None:
    """Copy a session. The two ids may belong to two engines, so the state passes through the frontend, where it needs no
    signature."""
    frontend.limits.memory.check_new_session()
    file = session_file.read(await frontend.dispatcher.export_session(caller.session(id)))
    await frontend.dispatcher.import_session(caller.session(copy), file, caller.max_sessions)


def _id(request: Request) -> str:
    """Return the session in the path; raises InvalidInput for a malformed id, or if the header names another session."""
    id = check_session_id(request.path_params["id"])
    resolve_session(id, named_session(request), "session")
    return id
