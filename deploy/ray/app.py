"""The service as a Ray Serve application: each replica owns a `seqserve serve`, and Ray places, watches and scales the replicas.

Serve's proxy sends requests through the replica to its server. With `direct`, the server listens on the node's address instead and takes
traffic itself, and the replica reports its ports to the directory.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import ray
from pydantic import BaseModel
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from yarl import URL

from deploy.ray.directory import directory
from deploy.ray.endpoints import FORGOTTEN_SECONDS, Replica, View, move_into_place, peers
from deploy.ray.server import ServerFailed, ServerProcess, free_port

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
POLICY = "deploy.ray.scaling:FiguresPolicy"
DIRECTORY_SECONDS = 3.0
MEETING_SECONDS = FORGOTTEN_SECONDS
"""How long a replica waits until its server is connected to every other. After this time the directory lists only those that report."""
MEETING_POLL_SECONDS = 0.2
SERVER_ENDED = 70
"""Exit status of a replica whose server ended by itself."""
MARGIN_SECONDS = 10.0
"""Beyond lame duck and drain: for the end of the server's processes."""
WHOLE_BYTES = 64 * 1024
"""A body of known length up to this size is passed on whole, a longer one in parts."""
HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade")
)


NO_ANSWER = {"error": "the server of this replica gave no answer, retry", "code": "unavailable", "field": None}
IDLE_SECONDS = 10.0
"""Shorter than SEQSERVE_IDLE_SECONDS: a request never meets a connection that the server is about to close."""


class Options(BaseModel):
    """Arguments of the application, under `args` in serve.yaml.

    command: starts the server; settings: SEQSERVE_ variables, lame duck and drain excepted; direct: traffic goes straight to the
    servers; peers: with `direct`, sessions move between the servers, which needs SEQSERVE_PEER_KEYS in the settings; key_file: has a key
    with the scope metrics, which the figures need if the settings name keys; max_ongoing_requests: of a replica; backlog_seconds,
    busy_share: targets of the autoscaler.
    """

    command: list[str] = ["seqserve", "serve"]
    settings: dict[str, str] = {}
    direct: bool = False
    peers: bool = False
    key_file: str = ""
    start_seconds: float = 300.0
    lame_duck_seconds: float = 5.0
    drain_seconds: float = 30.0
    max_ongoing_requests: int = 1024
    min_replicas: int = 1
    max_replicas: int = 3
    max_replicas_per_node: int | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    backlog_seconds: float = 0.02
    busy_share: float = 0.6
    upscale_delay_s: float = 15.0
    downscale_delay_s: float = 300.0
    metrics_interval_s: float = 5.0
    look_back_period_s: float = 15.0
    health_check_period_s: float = 2.0

    @property
    def stop_seconds(self) -> float:
        return self.lame_duck_seconds + self.drain_seconds + MARGIN_SECONDS

    @property
    def variables(self) -> dict[str, str]:
        limits = {
            "SEQSERVE_LAME_DUCK_SECONDS": str(self.lame_duck_seconds),
            "SEQSERVE_DRAIN_SECONDS": str(self.drain_seconds),
        }
        return self.settings | limits


class SeqserveReplica:
    """A replica and its server."""

    async def __init__(self, options: Options) -> None:  # type: ignore[misc]  # Serve awaits it
        self._options = options
        self._id = serve.get_replica_context().replica_id.unique_id
        host = ray.util.get_node_ip_address() if options.direct else "127.0.0.1"
        self._known: dict[str, Replica] = {}
        self._url = self._grpc = ""
        """The ports of the server from the moment it may take traffic."""
        self._peer, self._peers_file = "", Path(tempfile.mkdtemp(prefix="seqserve-"), "peers")
        variables = options.variables
        if options.direct and options.peers:
            self._peer = f"{host}:{free_port(host)}"
            variables |= {"SEQSERVE_PEERS": f"file:{self._peers_file}", "SEQSERVE_PEER_PORT": self._peer.rpartition(":")[2]}
            await self._join()
        self._server = await ServerProcess.start(options.command, variables, host, options.start_seconds, options.key_file)
        # No limit of connections: Serve and the server limit requests. The client's headers and deadlines hold.
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        self._watching = asyncio.ensure_future(self._end_with_server())
        if self._peer:
            await self._meet()
        self._url, self._grpc = self._server.url, self._server.grpc
        await self._report()

    async def _end_with_server(self) -> None:
        """End this process when its server has ended: Serve then sends nothing more to it, and starts another replica."""
        status = await self._server.ended()
        print(f"seqserve ended with status {status}", file=sys.stderr, flush=True)
        os._exit(SERVER_ENDED)

    async def __call__(self, request: Request) -> Response:
        """Pass a request on to the server, with all its headers: x-session-id is among them."""
        body: Any = request.stream()
        length = request.headers.get("content-length")
        if length is not None and int(length) <= WHOLE_BYTES:
            body = await request.body()
        elif length is None and "transfer-encoding" not in request.headers:
            body = None
        target = URL(f"{self._server.url}{_path_of(request)}", encoded=True)
        sent = _passed_on(request.headers.items(), without={"host"})
        try:
            answer = await self._client.request(request.method, target, headers=sent, data=body, allow_redirects=False)
        except aiohttp.ClientError as error:
            return Response(
                json.dumps(NO_ANSWER | {"error": f"{NO_ANSWER['error']}: {error}"}), 503, media_type="application/json"
            )
        headers = dict(_passed_on(answer.headers.items()))
        if int(answer.headers.get("content-length", WHOLE_BYTES + 1)) <= WHOLE_BYTES:
            async with answer:
                return Response(await answer.read(), answer.status, headers)
        return StreamingResponse(_parts(answer), answer.status, headers)

    async def check_health(self) -> None:
        await self._server.check()
        await self._report()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self._server.figures()

    async def __del__(self) -> None:
        """Drain the server. Serve has stopped sending; with `direct`, the directory tells the proxies first."""
        if not hasattr(self, "_server"):
            return
        await self._tell("drain")
        self._watching.cancel()
        await self._server.stop(self._options.stop_seconds - MARGIN_SECONDS / 2)
        await self._tell("remove")
        await self._client.close()
        shutil.rmtree(self._peers_file.parent, ignore_errors=True)

    async def _join(self) -> None:
        """Write the peers file before the server starts. Raises ServerFailed without an answer of the directory.

        A server that knew only itself would begin sessions anew that live elsewhere.
        """
        if await self._report() is None:
            raise ServerFailed("the directory gave no answer: the other replicas are not known")

    async def _meet(self) -> None:
        """Wait until the server is connected to every other replica that may have sessions."""
        until = time.monotonic() + MEETING_SECONDS
        while time.monotonic() < until:
            view = await self._report()
            if view is not None and view.settled and await self._server.peers() >= view.serving_besides(self._id):
                return
            await asyncio.sleep(MEETING_POLL_SECONDS)
        print("not every other replica answers: sessions that may be there are refused", file=sys.stderr, flush=True)

    async def _report(self) -> View | None:
        """Tell the directory where this server is, and the server where the others are. Returns what the directory knows."""
        view: View | None = await self._tell("report", self._url, self._grpc, self._peer)
        if self._peer and view is not None:
            self._known = view.merged(self._known)
            move_into_place(self._peers_file, peers(self._known.values()))
        return view

    async def _tell(self, method: str, *arguments: str) -> Any:
        """Call the directory and return its answer, or None without one: traffic goes on while it restarts."""
        if not self._options.direct:
            return None
        try:
            return await asyncio.wait_for(getattr(directory(), method).remote(self._id, *arguments), DIRECTORY_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            print(f"the directory gave no answer: {error!r}", file=sys.stderr, flush=True)
            return None


def _path_of(request: Request) -> str:
    """Return the path and the query as the client sent them: a session's name in the path may have encoded slashes."""
    raw: bytes | None = request.scope.get("raw_path")
    path = raw.decode("ascii") if raw else quote(request.scope["path"])
    query: str = request.scope["query_string"].decode("ascii")
    return f"{path}?{query}" if query else path


def _passed_on(headers: Iterable[tuple[str, str]], without: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Return the headers that concern the request, not the connection. A repeated header stays repeated: the server decides about it."""
    pairs = list(headers)
    named = {name.strip().lower() for key, value in pairs if key.lower() == "connection" for name in value.split(",")}
    return [(name, value) for name, value in pairs if name.lower() not in HOP_BY_HOP.union(named, without)]


async def _parts(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:
        async for part in answer.content.iter_any():
            yield part


def app(options: Options) -> serve.Application:
    """Return the application. Serve calls it with the `args` of serve.yaml."""
    autoscaling = AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas,
        metrics_interval_s=options.metrics_interval_s,
        look_back_period_s=options.look_back_period_s,
        upscale_delay_s=options.upscale_delay_s,
        downscale_delay_s=options.downscale_delay_s,
        policy=AutoscalingPolicy(
            policy_function=POLICY,
            policy_kwargs={"backlog_seconds": options.backlog_seconds, "busy_share": options.busy_share},
        ),
    )
    deployment = serve.deployment(
        SeqserveReplica,
        name="seqserve",
        max_ongoing_requests=options.max_ongoing_requests,
        max_replicas_per_node=options.max_replicas_per_node,
        graceful_shutdown_timeout_s=options.stop_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=options.health_check_period_s,
        health_check_timeout_s=10.0,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        autoscaling_config=autoscaling,
        # Without a fallback: another replica does not have the session's state.
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"num_virtual_nodes": 100, "num_fallback_replicas": 0}
        ),
    )
    return deployment.bind(options)
