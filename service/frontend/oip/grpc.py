"""The gRPC face of the Open Inference Protocol V2: messages to values and back. `oip` and `oip_models` decide.

An error is a status with the message that HTTP gives; its code, the field at fault and the seconds until a retry makes sense follow in the
trailing metadata seqserve-code, seqserve-field and retry-after.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from service.errors import ServiceError, Unsupported
from service.frontend.inference import CallerGone, Frontend, bug
from service.frontend.oip import metadata, protobuf_codec
from service.frontend.oip.grpc_calls import Context, Ending, accepted, answer, read, refuse
from service.frontend.oip.grpc_stream import Stream
from service.frontend.oip.protobuf import METHODS, SERVICE, Message

Handle = Callable[[bytes, Context], Awaitable[bytes]]
Said = Callable[[Frontend, Message], Awaitable[dict[str, Any]]]
"""What is said of the service, a model or the models folder: the fields of the message that answers."""


def handlers(frontend: Frontend, ending: Ending) -> grpc.GenericRpcHandler:
    """Every method that is served, as a server takes them: bytes in, bytes out."""
    told = {name: grpc.unary_unary_rpc_method_handler(_told(name, said, frontend)) for name, said in SAID.items()}
    infer = grpc.unary_unary_rpc_method_handler(_infer(frontend, ending))
    stream = grpc.stream_stream_rpc_method_handler(_stream(frontend, ending))
    return grpc.method_handlers_generic_handler(SERVICE, {**told, "ModelInfer": infer, "ModelStreamInfer": stream})


def _infer(frontend: Frontend, ending: Ending) -> Handle:
    async def infer(data: bytes, context: Context) -> bytes:
        ending.waits_for_me()
        with accepted(frontend, ending, time.monotonic()) as call:
            asked = protobuf_codec.request(read(METHODS["ModelInfer"], data, frontend))
            response: bytes = (await answer(frontend, call, asked, context)).SerializeToString()
            return response

    return _or_refusal(frontend, infer)


def _stream(frontend: Frontend, ending: Ending) -> Callable[[AsyncIterator[bytes], Context], Awaitable[None]]:
    async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
        ending.waits_for_me()
        await Stream(frontend, ending, context).run(requests)

    return handle


def _told(name: str, said: Said, frontend: Frontend) -> Handle:
    method = METHODS[name]

    async def tell(data: bytes, context: Context) -> bytes:
        response: bytes = ParseDict(await said(frontend, read(method, data, frontend)), method.gives()).SerializeToString()
        return response

    return _or_refusal(frontend, tell)


def _or_refusal(frontend: Frontend, handle: Handle) -> Handle:
    """The same, with the status of an error instead of what is raised."""

    async def handled(data: bytes, context: Context) -> bytes:
        try:
            return await handle(data, context)
        except CallerGone:
            raise asyncio.CancelledError from None
        except ServiceError as fault:
            await refuse(context, fault)
        except Exception as fault:
            await refuse(context, bug(frontend, fault))

    return handled


async def _server_live(frontend: Frontend, asked: Message) -> dict[str, Any]:
    return {"live": True}


async def _server_ready(frontend: Frontend, asked: Message) -> dict[str, Any]:
    return {"ready": frontend.ready}


async def _server_metadata(frontend: Frontend, asked: Message) -> dict[str, Any]:
    return metadata.server_metadata()


async def _model_ready(frontend: Frontend, asked: Message) -> dict[str, Any]:
    return {"ready": metadata.ready(frontend, asked.name, asked.version)}


async def _model_metadata(frontend: Frontend, asked: Message) -> dict[str, Any]:
    return metadata.model_metadata(frontend, asked.name, asked.version)


async def _model_config(frontend: Frontend, asked: Message) -> dict[str, Any]:
    return {"config": metadata.model_config(frontend, asked.name, asked.version)}


async def _statistics(frontend: Frontend, asked: Message) -> dict[str, Any]:
    return await metadata.statistics(frontend, asked.name, asked.version)


async def _index(frontend: Frontend, asked: Message) -> dict[str, Any]:
    return {"models": await metadata.index(frontend, ready=asked.ready)}


async def _load(frontend: Frontend, asked: Message) -> dict[str, Any]:
    await frontend.supervisor.load(asked.model_name, metadata.policy(protobuf_codec.plain(asked.parameters)))
    return {}


async def _unload(frontend: Frontend, asked: Message) -> dict[str, Any]:
    await frontend.supervisor.unload(asked.model_name)
    return {}


async def _not_here(frontend: Frontend, asked: Message) -> dict[str, Any]:
    raise Unsupported(metadata.NOT_HERE)


ELSEWHERE = [*(name for name in METHODS if "SharedMemory" in name), "TraceSetting", "LogSettings"]
SAID: dict[str, Said] = {
    "ServerLive": _server_live,
    "ServerReady": _server_ready,
    "ServerMetadata": _server_metadata,
    "ModelReady": _model_ready,
    "ModelMetadata": _model_metadata,
    "ModelConfig": _model_config,
    "ModelStatistics": _statistics,
    "RepositoryIndex": _index,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
    **dict.fromkeys(ELSEWHERE, _not_here),
}
