"""The gRPC methods of the Open Inference Protocol V2. They translate messages; `infer` and `metadata` decide.

An error becomes a status with the same message as over HTTP. The trailing metadata seqserve-code, seqserve-field and retry-after
hold its code, the invalid field and the seconds after which a retry makes sense.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc

from service.errors import Unavailable, UnknownModel, Unsupported
from service.frontend.grpc.calls import CallExchange, GrpcContext, GrpcShutdown, read_message
from service.frontend.grpc.infer import GrpcRunner, StreamRunner
from service.frontend.grpc.stream import InferStream
from service.frontend.oip import metadata, protobuf
from service.frontend.oip.protobuf import METHODS, SERVICE, ProtoMessage
from service.frontend.run.frontend import Frontend

UnaryHandler = Callable[[bytes, GrpcContext], Awaitable[bytes | memoryview]]
MetadataHandler = Callable[[Frontend, ProtoMessage], Awaitable[dict[str, Any] | bytes]]
"""Handles a request about the server, a model or the repository. Returns the response message, or its fields."""


def rpc_handlers(frontend: Frontend, shutdown: GrpcShutdown) -> grpc.GenericRpcHandler:
    """Return the handlers of all methods for a gRPC server. Requests and responses are bytes."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(_metadata_method(name, handler, frontend))
        for name, handler in METADATA_HANDLERS.items()
    }
    handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(_infer_method(frontend, shutdown))
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(_stream_method(frontend, shutdown))
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _infer_method(frontend: Frontend, shutdown: GrpcShutdown) -> UnaryHandler:
    runner = GrpcRunner(frontend)

    async def handle(data: bytes, context: GrpcContext) -> bytes | memoryview:
        shutdown.wait_for_this_call()
        arrived, exchange = time.monotonic(), CallExchange(context, shutdown)
        async with AsyncExitStack() as stack:
            with runner.reading(exchange, arrived, context.caller):
                decoded = await runner.decode_slowly(data, context, stack)
            return (await runner.answer(decoded, exchange, arrived, context.caller)).content

    return handle


def _stream_method(
    frontend: Frontend, shutdown: GrpcShutdown
) -> Callable[[AsyncIterator[bytes], GrpcContext], Awaitable[None]]:
    runner = StreamRunner(frontend)

    async def handle(requests: AsyncIterator[bytes], context: GrpcContext) -> None:
        shutdown.wait_for_this_call()
        await InferStream(runner, shutdown, context).run(requests)

    return handle


def _metadata_method(name: str, handler: MetadataHandler, frontend: Frontend) -> UnaryHandler:
    messages = METHODS[name]

    async def handle(data: bytes, context: GrpcContext) -> bytes:
        fields = await handler(frontend, read_message(messages, data))
        return fields if isinstance(fields, bytes) else messages.write(fields)

    return handle


async def _handle_server_live(frontend: Frontend, request: ProtoMessage) -> dict[str, Any]:
    return {"live": True}


async def _handle_server_ready(frontend: Frontend, request: ProtoMessage) -> dict[str, Any]:
    return {"ready": frontend.ready}


async def _handle_server_metadata(frontend: Frontend, request: ProtoMessage) -> dict[str, Any]:
    return metadata.server_metadata()


async def _handle_model_ready(frontend: Frontend, request: ProtoMessage) -> dict[str, Any]:
    try:
        return {"ready": metadata.model_ready(frontend, request.name, request.version)}
    except (Unavailable, UnknownModel):
        return {"ready": False}


async def _handle_model_metadata(frontend: Frontend, request: ProtoMessage) -> dict[str, Any]:
    return metadata.model_metadata(frontend, request.name, request.version)


async def _handle_model_config(frontend: Frontend, request: ProtoMessage) -> dict[str, Any]:
    return {"config": metadata.model_config(frontend, request.name, request.version)}


async def _handle_model_statistics(frontend: Frontend, request: ProtoMessage) -> bytes:
    return await metadata.model_statistics(frontend, METHODS["ModelStatistics"].write, request.name, request.version)


async def _handle_repository_index(frontend: Frontend, request: ProtoMessage) -> dict[str, Any]:
    return {"models": await metadata.repository_index(frontend, ready=request.ready)}


async def _handle_load(frontend: Frontend, request: ProtoMessage) -> dict[str, Any]:
    policy = metadata.version_policy(protobuf.parameter_values(request.parameters))
    await frontend.supervisor.load(request.model_name, policy)
    return {}


async def _handle_unload(frontend: Frontend, request: ProtoMessage) -> dict[str, Any]:
    await frontend.supervisor.unload(request.model_name)
    return {}


async def _handle_unsupported(frontend: Frontend, request: ProtoMessage) -> dict[str, Any]:
    raise Unsupported(metadata.UNSUPPORTED_EXTENSION)


UNSUPPORTED_METHODS = [*(name for name in METHODS if "SharedMemory" in name), "TraceSetting", "LogSettings"]
METADATA_HANDLERS: dict[str, MetadataHandler] = {
    "ServerLive": _handle_server_live,
    "ServerReady": _handle_server_ready,
    "ServerMetadata": _handle_server_metadata,
    "ModelReady": _handle_model_ready,
    "ModelMetadata": _handle_model_metadata,
    "ModelConfig": _handle_model_config,
    "ModelStatistics": _handle_model_statistics,
    "RepositoryIndex": _handle_repository_index,
    "RepositoryModelLoad": _handle_load,
    "RepositoryModelUnload": _handle_unload,
    **dict.fromkeys(UNSUPPORTED_METHODS, _handle_unsupported),
}
