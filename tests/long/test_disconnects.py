"""4,000 clients that disconnect at every point of their requests leave nothing behind. `make test-all` runs it.

The times are steps of a planted device: see disconnects.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service.access.keys import create
from service.access.scopes import Scope
from tests.long.disconnects import Service, check_wave, gated, outcomes_of
from tests.long.visits import HTTP, REPLY
from tests.serving import eventually
from tests.tracer.receiver import Receiver, receiving

WAVES = {0: 150, 1: 2_000, 2: 2_000}
"""Clients of each wave, by its seed. The first wave fills all caches."""
TRACEPARENT = f"traceparent: 00-{'ab' * 16}-{'cd' * 8}-01"


def test_4000_clients_that_disconnect_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their requests end, and their resources are free, before the step during which they leave ends."""
    with gated(tmp_path) as service:
        for seed, count in WAVES.items():
            clients = check_wave(service, count, seed)
            with capsys.disabled():
                print(f"\n{dict(Counter(f'{client.kind} {client.point}' for client in clients))}", end="")
        assert not service.server.events("bug") + service.server.events("library warning")


@contextmanager
def with_everything(folder: Path) -> Iterator[tuple[Service, Receiver, tuple[str, ...]]]:
    """A server with keys, traces, compression and the access log, and the headers that its clients send."""
    keys = folder / "keys.toml"
    token = create(keys, "client", [Scope.INFER, Scope.SESSION, Scope.METRICS], "tenant")
    headers = (f"Authorization: Bearer {token}", TRACEPARENT, "Accept-Encoding: gzip")
    settings = {"trace_rate": "1", "access_log_rate": "1"}
    with receiving("grpc") as receiver:
        settings["trace_endpoint"] = receiver.endpoint
        with gated(folder, "--keys", str(keys), token=token, **settings) as service:
            yield service, receiver, headers


def test_4000_clients_leave_nothing_behind_with_everything_switched_on(tmp_path: Path) -> None:
    """Their requests have the same outcomes as without keys, traces, compression and the access log."""
    with with_everything(tmp_path) as (service, receiver, headers):
        clients = [client for seed, count in WAVES.items() for client in check_wave(service, count, seed, headers)]
        assert any(b"gzip" in client.beginning for client in clients if (client.kind, client.point) == (HTTP, REPLY))
        # The log has no request whose body is cut off on a fast path.
        begun = Counter(ok=outcomes_of(clients)["ok"], client_gone=sum(client.counted for client in clients))
        assert Counter(event["outcome"] for event in service.server.events("request")) == begun
        assert service.server.metric("seqserve_traced_requests_total") >= sum(client.complete for client in clients)
        eventually(lambda: any(span.attributes.get("seqserve.outcome") == "client_gone" for span in receiver.spans))
        assert not service.server.events("bug") + service.server.events("library warning")
