"""The HTTP routes of sessions themselves: a state is taken along, brought back, copied, or given up. Chunks go to /infer and /stream."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from service.frontend.http_exchange import BYTES, read_json, read_state, unless_gone, written
from service.frontend.inference import Frontend
from service.frontend.rest import schemas

PATH = "/sessions/{id:path}/state"
FORK_PATH = "/sessions/{id:path}/fork"
_ID = {"name": "id", "in": "path", "required": True, "schema": schemas.SESSION_SCHEMA}
_STATE = {"schema": {"type": "string", "format": "binary"}}


def add(router: APIRouter, frontend: Frontend, responses: dict[int | str, dict[str, Any]]) -> None:
    """Serve them, with these error responses described."""

    @router.get(PATH, responses={**responses, 200: {"content": {BYTES: _STATE}}}, openapi_extra={"parameters": [_ID]})
    async def take_state(request: Request) -> Response:
        """The state of a session as a safetensors file, which any replica with the same model takes; the session stays open."""
        state = await unless_gone(request, frontend.engines.export_session(_id(request)))
        return written(frontend, state, BYTES)

    @router.put(
        PATH,
        response_model=schemas.SessionAnswer,
        responses=responses,
        openapi_extra={"parameters": [_ID], "requestBody": {"required": True, "content": {BYTES: _STATE}}},
    )
    async def bring_state(request: Request) -> Response:
        """Open a session that goes on where the one was of which this is the state."""
        id, state = _id(request), await read_state(request, frontend)
        await unless_gone(request, frontend.engines.import_session(id, state))
        return _named(frontend, id)

    @router.delete(PATH, response_model=schemas.SessionAnswer, responses=responses, openapi_extra={"parameters": [_ID]})
    async def end(request: Request) -> Response:
        """End a session; its state is gone."""
        id = _id(request)
        await unless_gone(request, frontend.engines.end_session(id))
        return _named(frontend, id)

    @router.post(
        FORK_PATH,
        response_model=schemas.SessionAnswer,
        responses=responses,
        openapi_extra={"parameters": [_ID], **schemas.described(schemas.ForkBody, {"session": "the-copy"})},
    )
    async def fork(request: Request) -> Response:
        """Open another session that goes on from where this one is now."""
        id, body = _id(request), schemas.ForkBody.parse(await read_json(request, frontend))
        await unless_gone(request, _fork(frontend, id, body.session))
        return _named(frontend, body.session)


async def _fork(frontend: Frontend, id: str, copy: str) -> None:
    """From one home to the other, which may be two engines."""
    await frontend.engines.import_session(copy, await frontend.engines.export_session(id))


def _id(request: Request) -> str:
    return schemas.session_id(request.path_params["id"])


def _named(frontend: Frontend, id: str) -> Response:
    return written(frontend, msgspec.json.encode({"session": id}))
