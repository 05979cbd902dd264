"""`seqserve serve` on Ray Serve: each replica owns a server and passes requests on to it. docs/ray.md shows how to deploy it."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping

import aiohttp
from ray import serve
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketState
from yarl import URL

COMMAND = ("setpriv", "--pdeathsig", "TERM", "seqserve", "serve", "--host", "127.0.0.1", "--grpc-port", "0")
"""The kernel sends SIGTERM to the server when its replica is killed: the server would otherwise run on and hold the device."""
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
HOP_BY_HOP = ("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
ADDED_BY_RAY = ("date", "x-request-id")


@serve.deployment(name="seqserve")
@serve.ingress()
class Replica:
    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._client = aiohttp.ClientSession(
            # Ray and the server limit requests. An idle connection closes before SEQSERVE_IDLE_SECONDS: no request meets its end.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=10),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        self._server = await asyncio.create_subprocess_exec(*COMMAND, "--port", str(self._port))
        while not await self._answers("/readyz"):
            if self._server.returncode is not None:
                raise RuntimeError(
                    f"seqserve ended with status {self._server.returncode}: the reason is in the log of this replica"
                )
            await asyncio.sleep(0.2)
        self._watching = asyncio.create_task(self._end_with_server())

    def __serve_build_asgi_app__(self) -> Starlette:
        http = Route("/{path:path}", self._pass_on, methods=METHODS)
        return Starlette(routes=[http, WebSocketRoute("/{path:path}", self._pass_on_messages)])

    async def check_health(self) -> None:
        if not await self._answers("/healthz"):
            raise RuntimeError("seqserve does not answer /healthz")

    async def __del__(self) -> None:
        """Drain the server, once Ray sends nothing more. After graceful_shutdown_timeout_s, Ray kills this process."""
        if hasattr(self, "_watching"):
            self._watching.cancel()
            self._server.send_signal(signal.SIGTERM)
            await self._server.wait()

    async def _answers(self, path: str) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with self._client.get(f"http://127.0.0.1:{self._port}{path}") as reply:
                return reply.status == 200
        return False

    async def _end_with_server(self) -> None:
        """End this process when its server has ended: Ray then sends nothing more to it, and starts another replica."""
        os._exit(await self._server.wait() or 1)

    def _url(self, client: HTTPConnection) -> URL:
        """Return path and query as the client sent them: a session's name in the path may have encoded slashes."""
        path, query = client.scope["raw_path"].decode(), client.scope["query_string"].decode()
        return URL.build(scheme="http", host="127.0.0.1", port=self._port, path=path, query_string=query, encoded=True)

    async def _pass_on(self, request: Request) -> Response:
        """Send a request to the server, and return its reply, both as they arrive."""
        url, headers = self._url(request), kept(request.headers)
        body = request.stream() if {"content-length", "transfer-encoding"} & set(request.headers) else None
        try:
            reply = await self._client.request(request.method, url, headers=headers, data=body, allow_redirects=False)
        except aiohttp.ClientError as error:
            return JSONResponse({"error": f"the server gave no reply: {error}", "code": "unavailable", "field": None}, 503)
        response = StreamingResponse(reply.content.iter_any(), reply.status)
        response.raw_headers = [(name.encode(), value.encode()) for name, value in kept(reply.headers, ADDED_BY_RAY)]
        return response

    async def _pass_on_messages(self, client: WebSocket) -> None:
        """Connect a WebSocket to the server, and close it with the server's code."""
        url, headers, protocols = self._url(client), kept(client.headers), client.scope["subprotocols"]
        try:
            server = await self._client.ws_connect(url, headers=headers, protocols=protocols, max_msg_size=0)
        except aiohttp.WSServerHandshakeError as refusal:
            await client.send_denial_response(Response(status_code=refusal.status))
            return
        async with server:
            await client.accept(server.protocol)
            sending = asyncio.create_task(send_messages(client, server))
            async for message in server:
                await (client.send_text if message.type is aiohttp.WSMsgType.TEXT else client.send_bytes)(message.data)
            sending.cancel()
            if client.client_state is WebSocketState.CONNECTED:
                await client.close(server.close_code or 1011)


async def send_messages(client: WebSocket, server: aiohttp.ClientWebSocketResponse) -> None:
    with contextlib.suppress(ConnectionError):
        while (message := await client.receive())["type"] == "websocket.receive":
            await (server.send_bytes(message["bytes"]) if message.get("text") is None else server.send_str(message["text"]))
        await server.close()


def kept(headers: Mapping[str, str], dropped: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Return all headers, also repeated headers, except `dropped` and the headers of one connection."""
    pairs = [(name.lower(), value) for name, value in headers.items()]
    return [pair for pair in pairs if pair[0] not in (*HOP_BY_HOP, *dropped) and not pair[0].startswith("sec-websocket-")]


app = Replica.bind()  # type: ignore[attr-defined]  # Ray's decorator adds it
