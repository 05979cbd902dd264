"""The gRPC methods of the Open Inference Protocol V2. They translate messages; `infer` and `metadata` decide.

An error becomes a status with the same message as over HTTP. The trailing metadata seqserve-code, seqserve-field and retry-after
hold its code, the invalid field and the seconds after which a retry makes sense.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from service.errors import TooLarge, Unavailable, UnknownModel, Unsupported
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.grpc.calls import GrpcCall
from service.frontend.grpc.infer import GrpcRunner, StreamRunner
from service.frontend.grpc.routes import INFER_PATH, STREAM_PATH, Method
from service.frontend.grpc.stream import InferStream
from service.frontend.oip import metadata, protobuf
from service.frontend.oip.protobuf import METHODS, SERVICE, ProtoMessage
from service.frontend.run.frontend import Frontend

Fields = dict[str, Any]
MetadataHandler = Callable[[ProtoMessage], Fields | Awaitable[Fields | bytes]]
"""Handles a request about the server, a model or the repository. Returns the response message, or its fields."""
UNSUPPORTED_METHODS = [*(name for name in METHODS if "SharedMemory" in name), "TraceSetting", "LogSettings"]


def oip_methods(frontend: Frontend) -> dict[str, Method]:
    """Return all methods by path. Requests and responses are bytes."""
    handlers = _metadata_handlers(frontend)
    methods = {f"/{SERVICE}/{name}": _metadata_method(name, handler) for name, handler in handlers.items()}
    return {**methods, INFER_PATH: _infer_method(frontend), STREAM_PATH: _stream_method(frontend)}


def _infer_method(frontend: Frontend) -> Method:
    runner = GrpcRunner(frontend)

    async def handle(data: bytes, call: GrpcCall) -> bytes | memoryview:
        arrived, exchange = time.monotonic(), call.exchange()
        async with AsyncExitStack() as stack:
            with runner.reading(exchange, arrived, call.caller):
                decoded = await runner.decode_slowly(data, call.route.session, call.deadline, stack)
            return (await runner.answer(decoded, exchange, arrived, call.caller)).content

    return Method(handle)


def _stream_method(frontend: Frontend) -> Method:
    runner = StreamRunner(frontend)

    async def handle(requests: AsyncIterator[bytes], call: GrpcCall) -> None:
        await InferStream(runner, call).run(requests)

    return Method(handle, reads_stream=True, writes_stream=True)


def _metadata_method(name: str, handler: MetadataHandler) -> Method:
    messages = METHODS[name]

    async def handle(data: bytes, call: GrpcCall) -> bytes:
        if len(data) > MAX_LOOP_BODY_BYTES:
            raise TooLarge(
                f"the message has {len(data)} bytes, but at most {MAX_LOOP_BODY_BYTES} are allowed: send a smaller message"
            )
        result = handler(messages.parse(data))
        fields = await result if inspect.isawaitable(result) else result
        return fields if isinstance(fields, bytes) else messages.write(fields)

    return Method(handle)


def _metadata_handlers(frontend: Frontend) -> dict[str, MetadataHandler]:
    """Return the handlers of the methods about the server, models and the repository, by the names of the methods."""

    def model_ready(request: ProtoMessage) -> Fields:
        try:
            return {"ready": metadata.model_ready(frontend, request.name, request.version)}
        except (Unavailable, UnknownModel):
            return {"ready": False}

    async def repository_index(request: ProtoMessage) -> Fields:
        return {"models": await metadata.repository_index(frontend, ready=request.ready)}

    async def load(request: ProtoMessage) -> Fields:
        policy = metadata.version_policy(protobuf.parameter_values(request.parameters))
        await frontend.supervisor.load(request.model_name, policy)
        return {}

    async def unload(request: ProtoMessage) -> Fields:
        await frontend.supervisor.unload(request.model_name)
        return {}

    def unsupported(_: ProtoMessage) -> Fields:
        raise Unsupported(metadata.UNSUPPORTED_EXTENSION)

    write_statistics = METHODS["ModelStatistics"].write
    return {
        "ServerLive": lambda _: {"live": True},
        "ServerReady": lambda _: {"ready": frontend.ready},
        "ServerMetadata": lambda _: metadata.server_metadata(),
        "ModelReady": model_ready,
        "ModelMetadata": lambda request: metadata.model_metadata(frontend, request.name, request.version),
        "ModelConfig": lambda request: {"config": metadata.model_config(frontend, request.name, request.version)},
        "ModelStatistics": lambda request: metadata.model_statistics(frontend, write_statistics, request.name, request.version),
        "RepositoryIndex": repository_index,
        "RepositoryModelLoad": load,
        "RepositoryModelUnload": unload,
        **dict.fromkeys(UNSUPPORTED_METHODS, unsupported),
    }
