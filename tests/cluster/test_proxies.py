"""Sessions behind the shipped configurations of real proxies, while replicas fail, come and go. `make test-all` runs this folder."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2
from websockets.sync.client import connect

from tests import models
from tests.accumulator import faults_of
from tests.cluster.replicas import Cluster, Replica, clustered
from tests.cluster.shipped import REPLICAS, Front, shipped
from tests.cluster.traffic import CONNECTIONS, HEADER, Round, Traffic, owners, rounds_during
from tests.proxies import PROXIES
from tests.serving import eventually

SESSIONS = 1000
SETTLE_SECONDS = 4.0
"""Longer than a proxy needs to notice a replica that is ready or not."""
RING = {"envoy"}
"""Proxies whose ring depends on the number of replicas: sessions of unchanged replicas may move as well."""
UNCHECKED = {"nginx"}
"""Proxies without health checks: they send requests to a replica that is not ready yet, which refuses them with 503."""
SERVICE = "/inference.GRPCInferenceService"


class Proxied(NamedTuple):
    """A cluster behind a proxy."""

    name: str
    front: Front
    cluster: Cluster


@contextmanager
def behind(proxy: str, folder: Path, **settings: str) -> Iterator[Proxied]:
    """Run three replicas behind a proxy."""
    models.accumulator(folder / "models")
    with (
        clustered(folder / "models", folder, REPLICAS, replicated="1", **settings) as cluster,
        shipped(proxy, cluster, folder) as front,
    ):
        eventually(lambda: uses_all(front, cluster))
        yield Proxied(proxy, front, cluster)


@pytest.fixture(params=PROXIES)
def proxied(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Proxied]:
    """Replicas whose sessions stay where they are: they do not know each other."""
    with behind(request.param, tmp_path) as started:
        yield started


@pytest.fixture(params=PROXIES)
def with_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Proxied]:
    """Replicas whose sessions move to where their next chunk arrives."""
    with behind(request.param, tmp_path, session_store=str(tmp_path / "sessions"), checkpoint_chunks="1") as started:
        yield started


def message(**parameters: bool) -> Any:
    """Return a ModelInferRequest of one step."""
    request = service_pb2.ModelInferRequest(model_name="accumulator", raw_input_contents=[b"\2\0\0\0"])
    request.inputs.add(name="ids", datatype="INT32", shape=[1, 1])
    for name, value in parameters.items():
        request.parameters[name].bool_param = value
    return request


def infer_over(channel: grpc.Channel) -> Any:
    """Return the method ModelInfer."""
    return channel.unary_unary(
        f"{SERVICE}/ModelInfer", service_pb2.ModelInferRequest.SerializeToString, service_pb2.ModelInferResponse.FromString
    )


def answers(cluster: Cluster) -> list[int]:
    """Return how many requests each replica has answered."""
    return [int(replica.metric("seqserve_requests_total", outcome="ok")) for replica in cluster.running]


def send_stateless(front: Front, requests: int) -> None:
    """Send requests without a session over HTTP, and as many over gRPC. The first may meet a proxy that has not checked all replicas."""
    with (
        httpx.Client(base_url=front.address, trust_env=False, timeout=60) as client,
        grpc.insecure_channel(front.grpc) as channel,
    ):
        infer = infer_over(channel)
        for _ in range(requests):
            client.post("/infer", json={"model": "accumulator", "inputs": [[2]]}).raise_for_status()
            infer(message(), timeout=60)


def uses_all(front: Front, cluster: Cluster) -> bool:
    """Return whether the proxy sends requests of both protocols to all replicas."""
    before = answers(cluster)
    try:
        send_stateless(front, 30)
    except (httpx.HTTPError, grpc.RpcError):
        return False
    return all(after > start for start, after in zip(before, answers(cluster), strict=True))


class Change(NamedTuple):
    """The effect of a change of the replicas on the sessions."""

    round: Round
    lost: int
    """Sessions that were lost with their replica."""
    moved: int
    """Sessions that their proxy sent to another replica although their replica still runs."""

    @classmethod
    def of(cls, round: Round, before: dict[str, str], gone: str) -> Change:
        """before: the replica of each session. gone: the replica that ended, empty for none."""
        assert not round.faults, faults_of(round.faults)
        assert len(set(round.lost)) == len(round.lost), "a loss is reported once"
        hosts = Counter(before[name] for name in round.lost if name in before)
        return cls(round, hosts.pop(gone, 0), hosts.total())

    def __str__(self) -> str:
        return f"{self.lost} lost with their replica, {self.moved} moved, {dict(self.round.failed) or 'no'} errors"


Story = Callable[[Proxied, Traffic], Awaitable[Mapping[str, object]]]
"""Sends chunks while replicas change, and returns the effect of each change."""


def test_thousand_sessions_meet_a_failed_a_new_and_a_drained_replica(
    proxied: Proxied, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_story(proxied, story)
    with capsys.disabled():
        print(f"\n{proxied.name}: {report}")


def run_story(proxied: Proxied, story: Story) -> str:
    """Run a story with SESSIONS sessions, and return its report on one line."""

    async def run() -> Mapping[str, object]:
        traffic = Traffic(proxied.front.address, SESSIONS)
        try:
            return await story(proxied, traffic)
        finally:
            await traffic.hang_up()

    return "; ".join(f"{change}: {effect}" for change, effect in asyncio.run(run()).items())


async def story(proxied: Proxied, traffic: Traffic) -> dict[str, Change]:
    """Send chunks of all sessions all the time, and check every sum and every loss."""
    cluster = proxied.cluster
    first, second, _ = cluster.replicas
    changes: dict[str, Change] = {}

    begun = await traffic.round() + await traffic.round()
    assert not begun.faults and not begun.lost and not begun.failed, begun
    before = await check_spread(traffic, cluster.running)

    owned = sum(host == first.host for host in before.values())
    round = await rounds_during(traffic, first.kill, SETTLE_SECONDS)
    change = changes["killed"] = Change.of(round, before, first.host)
    assert change.lost == owned, "every session of a replica that fails is reported, and each once"
    # Each connection may have had a chunk on its way, and the next in the backlog of the port that was not closed yet.
    assert round.failed.total() <= 2 * CONNECTIONS, round.failed
    check_moved(proxied, change)

    before = await owners(traffic.names, cluster.running)
    added: list[Replica] = []
    round = await rounds_during(traffic, lambda: added.append(cluster.again(first)), SETTLE_SECONDS)
    change = changes["added"] = Change.of(round, before, "")
    assert not round.failed or (proxied.name in UNCHECKED and set(round.failed) == {"unavailable"}), round.failed
    assert change.moved > 0, "a new replica takes sessions over, without their states"
    before = await owners(traffic.names, cluster.running)
    assert Counter(before.values())[first.host] > 0

    owned = sum(host == second.host for host in before.values())
    second.drain()
    round = await rounds_during(traffic, second.await_end, SETTLE_SECONDS)
    change = changes["drained"] = Change.of(round, before, second.host)
    # Without health checks a proxy sends requests until the port closes: one may arrive in the microseconds of the closing.
    assert round.failed.total() <= (2 if proxied.name in UNCHECKED else 0), round.failed
    assert change.lost == owned
    check_moved(proxied, change)
    return changes


def check_moved(proxied: Proxied, change: Change) -> None:
    """Check that only Envoy moves sessions of replicas that have not changed, and not many."""
    if proxied.name in RING:
        assert change.moved <= SESSIONS // 5
    else:
        assert change.moved == 0


def test_states_of_a_thousand_sessions_follow_them(with_store: Proxied, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_story(with_store, moving_story)
    with capsys.disabled():
        print(f"\n{with_store.name}, with a session store: {report}")


async def moving_story(proxied: Proxied, traffic: Traffic) -> dict[str, str]:
    """Send chunks of all sessions all the time: only the sessions of the failed replica are lost, each once."""
    cluster = proxied.cluster
    first, second, _ = cluster.replicas
    begun = await traffic.round() + await traffic.round()
    assert not begun.faults and not begun.lost and not begun.failed, begun

    held = sessions_of(first)
    killed = await rounds_during(traffic, first.kill, SETTLE_SECONDS)
    assert not killed.faults, faults_of(killed.faults)
    assert len(set(killed.lost)) == len(killed.lost) == held, "every session of a replica that fails is reported, and each once"
    assert killed.failed.total() <= 2 * CONNECTIONS, killed.failed

    added: list[Replica] = []
    grown = await rounds_during(traffic, lambda: added.append(cluster.again(first)), SETTLE_SECONDS)
    assert not grown.faults and not grown.lost, (faults_of(grown.faults), grown.lost)
    assert not grown.failed or (proxied.name in UNCHECKED and set(grown.failed) == {"unavailable"}), grown.failed
    taken = sessions_of(added[0])
    assert taken > 0, "a new replica takes sessions over"

    given = sessions_of(second)
    second.drain()
    drained = await rounds_during(traffic, second.await_end, SETTLE_SECONDS)
    assert not drained.faults and not drained.lost, (faults_of(drained.faults), drained.lost)
    assert drained.failed.total() <= (2 if proxied.name in UNCHECKED else 0), drained.failed
    assert sum(map(sessions_of, cluster.running)) == SESSIONS
    return {
        "killed": f"{held} lost, {dict(killed.failed) or 'no'} errors",
        "added": f"{taken} moved, {dict(grown.failed) or 'no'} errors",
        "drained": f"{given} moved, {dict(drained.failed) or 'no'} errors",
    }


def sessions_of(replica: Replica) -> int:
    """Return how many sessions a replica has. A request for the state of a session would bring the session there."""
    return int(replica.metric("seqserve_sessions"))


async def check_spread(traffic: Traffic, replicas: list[Replica]) -> dict[str, str]:
    """Return the replica of each session. Every replica has between half and twice its share."""
    found = await owners(traffic.names, replicas)
    assert len(found) == SESSIONS
    share = SESSIONS / len(replicas)
    counts = Counter(found.values())
    assert all(share / 2 < counts[replica.host] < share * 2 for replica in replicas), counts
    return found


def test_protocols_of_a_session_meet_one_replica(proxied: Proxied) -> None:
    """POST /infer, a WebSocket that names the session in its query, the session routes, and gRPC, behind all but nginx."""
    front = proxied.front
    with (
        httpx.Client(base_url=front.address, trust_env=False, timeout=60) as client,
        grpc.insecure_channel(front.grpc) as channel,
    ):
        infer = infer_over(channel)
        stream = channel.stream_stream(
            f"{SERVICE}/ModelStreamInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )
        for number in range(30):
            name = f"pump-{number}"
            answer = client.post(
                "/infer", json={"model": "accumulator", "inputs": [[2]], "start": True}, headers={HEADER: name}
            )
            assert answer.json()["session"]["steps"] == 1
            for query, headers in ((f"&session={name}", {}), ("", {HEADER: name})):
                address = f"{front.address.replace('http', 'ws')}/stream?model=accumulator{query}"
                with connect(address, proxy=None, additional_headers=headers) as socket:
                    socket.send(json.dumps({"input": [2], "start": False}))
                    answered = json.loads(socket.recv(timeout=60))
            assert answered["session"]["steps"] == 3
            assert client.get(f"/sessions/{name}/state").status_code == 200
            assert client.get(f"/sessions/{name}/state", headers={HEADER: name}).status_code == 200

            metadata, steps = [(HEADER, name)], []
            if proxied.name == "nginx":  # it hashes with the port: the sessions of the two protocols are apart
                steps.append(infer(message(sequence_start=True), metadata=metadata, timeout=60).parameters["sequence_steps"])
            steps.append(infer(message(), metadata=metadata, timeout=60).parameters["sequence_steps"])
            for part in stream(iter([message(), message()]), metadata=metadata, timeout=60):
                assert not part.error_message
                steps.append(part.infer_response.parameters["sequence_steps"])
            first = 1 if proxied.name == "nginx" else 4
            assert [step.int64_param for step in steps] == list(range(first, first + len(steps)))


def test_requests_without_a_session_use_all_replicas(proxied: Proxied) -> None:
    before = answers(proxied.cluster)
    send_stateless(proxied.front, 90)
    counts = [after - start for start, after in zip(before, answers(proxied.cluster), strict=True)]
    assert sum(counts) == 180 and min(counts) >= 30, counts
