"""Usual clients, new clients and health checks with 10,000 idle connections and 2,000 new ones a second. `make test-all` runs it."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.long.flood import NEW_AT_ONCE, flooded
from tests.long.health_checks import Checks
from tests.long.others import BODY, ROWS_AT_ONCE, UsualClients, on_planted_device
from tests.raw_websocket import connection
from tests.serving import LIMIT_SECONDS, Server, eventually, serving
from tests.steady import open_files

IDLE, PHASE_SECONDS = 10_000, 10.0
FEW_FILES, MARGIN = 4096, 3_000
"""Open files of a service that cannot hold all idle connections, and the files that a service needs besides its connections."""
USUAL_CALLERS = 16
"""Each of their connections is used several times a second: the connections that are idle for longest close first."""


class NewClients:
    """Clients that connect, send one request and disconnect. seconds: of each answer."""

    def __init__(self, server: Server) -> None:
        self._address = urlsplit(server.address).netloc
        self.seconds: list[float] = []
        self.failures: list[str] = []

    def send(self) -> None:
        began = time.monotonic()
        client = HTTPConnection(self._address, timeout=LIMIT_SECONDS)  # a client of httpx would prepare TLS, which takes 30 ms
        try:
            client.request("POST", "/infer", BODY)
            answer = client.getresponse()
            text = answer.read()
            assert answer.status == 200, text
        except (OSError, HTTPException) as error:
            self.failures.append(repr(error))
        finally:
            client.close()
        self.seconds.append(time.monotonic() - began)

    def __str__(self) -> str:
        return f"{len(self.seconds)} new clients, at most {1000 * max(self.seconds):.0f} ms, failures {self.failures}"


@contextmanager
def checking(server: Server) -> Iterator[Checks]:
    checks = Checks()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(checks.run, server.health)
        try:
            yield checks
        finally:
            checks.end()
            running.result()


@contextmanager
def serving_with_files(most: int, root: Path) -> Iterator[Server]:
    """Run a server whose processes can open at most `most` files."""
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings = {"max_batch_sequences": str(ROWS_AT_ONCE), "idle_seconds": "600"}
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        try:
            server = stack.enter_context(on_planted_device("slow-device", root, "--health-port", "0", **settings))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        yield server


@pytest.fixture(autouse=True)
def files() -> Iterator[int]:
    """Allow this process as many open files as the system does, and return their number."""
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("few", [False, True], ids=["all are held", "few files"])
def test_flood_of_connections_leaves_the_service_reachable(
    few: bool, files: int, tmp_path: Path, show: Callable[[object], None]
) -> None:
    """With few files, the service closes the connections that are idle for longest."""
    assert few or files >= IDLE + NEW_AT_ONCE + MARGIN, "the system allows too few open files"
    with ExitStack() as stack:
        server = stack.enter_context(serving_with_files(FEW_FILES if few else files, tmp_path))
        new = NewClients(server)
        flood = stack.enter_context(flooded(server, IDLE, new.send))
        if not few:
            eventually(lambda: open_files(server)["frontend-0"] > IDLE)
        usual = UsualClients.of(server, PHASE_SECONDS, callers=USUAL_CALLERS)
        with checking(server) as checks:
            comparison = usual.compare(lambda: flood.running(new.send), 1)
        show(f"{flood}; {comparison}\n{new}\n{checks}")
        assert not comparison.failures and not new.failures and not checks.late()
        assert (server.metric("seqserve_connections_closed_total", reason="too_many") > 0) == few
        assert not server.events("child ended") and not server.events("bug") and not server.events("library warning")


def test_few_open_files_are_enough_for_the_service(models_folder: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with serving(models_folder, tmp_path) as server, ExitStack() as silent:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for _ in range(260):
                silent.enter_context(connection(server))
            assert server.infer("words", ["how far"]).status_code == 200
            assert server.client.get("/metrics").status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
