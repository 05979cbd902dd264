"""Names of models that traverse, that are huge or that are paths make the service open nothing outside of its models folder.

A preloaded library records every file and folder that the processes open. The service may also open files of its own code, of the system
and of /proc.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import grpc
import pytest
import uvloop

from service.frontend.oip.protobuf import METHODS, SERVICE
from tests import models
from tests.long.fuzz.wire.line import send
from tests.long.environment import compiled
from tests.serving import Server, serving

MARK = "zq"
"""Part of every name of a client that could be a file, so that a path made of the name is recognised."""
OUTSIDE = f"../{MARK}-outside"
"""A model next to the models folder."""
NAMES = (
    *(OUTSIDE, f"../models/../{MARK}-outside", f"words/../../{MARK}-outside", f"./words/{MARK}", f"words/1/{MARK}", f"{MARK}/"),
    *(
        f"..{MARK}",
        f"...{MARK}",
        f"{MARK}..1",
        f"/etc/{MARK}",
        f"/{MARK}",
        "..",
        ".",
        "../..",
        "/etc/passwd",
        "../../../../etc/passwd",
    ),
    *(
        f"..\\{MARK}",
        f"{MARK}\0",
        f"words\0{MARK}",
        f" ..{MARK}",
        f"{MARK} ",
        f"\u2025/{MARK}",
        f"\uff0e\uff0e/{MARK}",
        f"%2e%2e%2f{MARK}",
    ),
    *(f"file:///{MARK}", f"~/{MARK}", f"{MARK}\n{MARK}", MARK * 128, MARK * 2_000, MARK * 500_000),
)
ALLOWED = (
    "__editable__",  # an entry of sys.path, which an import looks for
    *("/proc", "/sys", "/dev", "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types"),
)
"""Paths that the service may open besides its own code and Python's."""
HEAD = "{} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("opened_files.c", tmp_path_factory.mktemp("library"))


@contextmanager
def recorded(library: Path, scratch: Path) -> Iterator[tuple[Server, Path]]:
    """Run a server whose processes append the paths that they open to the yielded file."""
    models.words(scratch / "models")
    models.words(scratch, f"{MARK}-outside")
    record = scratch / "opened"
    record.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("OPENED_FILES", str(record))
        server = serving(scratch / "models", scratch)
        running = server.__enter__()
    try:
        yield running, record
    finally:
        server.__exit__(None, None, None)


def requests(name: str) -> list[bytes]:
    """Return requests over HTTP that name a model, a version or a session."""
    path = quote(name.encode("utf-8", "surrogateescape"), safe="")[:60_000]
    spelt = [path, path.replace("%2F", "/").replace("..", "%2e%2e")]
    targets = [
        f"{method} {target}"
        for each in spelt
        for method, target in (
            ("POST", f"/v2/repository/models/{each}/load"),
            ("POST", f"/v2/repository/models/{each}/unload"),
            ("GET", f"/v2/models/{each}"),
            ("GET", f"/v2/models/words/versions/{each}/ready"),
            ("GET", f"/models/{each}/card"),
            ("GET", f"/sessions/{each}/state"),
            ("GET", f"/stream?model={each}"),
        )
    ]
    bodies = [
        ("/infer", {"model": name, "inputs": ["how far"]}),
        ("/infer", {"model": "words", "version": name, "inputs": ["how far"]}),
        ("/infer", {"model": "words", "session": name, "inputs": ["how far"]}),
        ("/tokens", {"model": name, "inputs": ["how far"]}),
    ]
    posts = [(HEAD.format(f"POST {target}", "{}"), json.dumps(body).encode()) for target, body in bodies]
    made = [HEAD.format(line, 0).encode() for line in targets]
    return made + [head.format(len(body)).encode() + body for head, body in posts]


def call(server: Server, name: str) -> None:
    """Name a model in calls of gRPC."""
    with grpc.insecure_channel(server.grpc) as channel:
        for method, field in (
            ("ModelMetadata", "name"),
            ("ModelReady", "name"),
            ("ModelConfig", "name"),
            ("ModelInfer", "model_name"),
            ("RepositoryModelLoad", "model_name"),
            ("RepositoryModelUnload", "model_name"),
        ):
            messages = METHODS[method]
            with suppress(grpc.RpcError, UnicodeEncodeError):
                message = messages.request_type(**{field: name})
                channel.unary_unary(f"/{SERVICE}/{method}")(message.SerializeToString(), timeout=60)


def send_names(server: Server, names: Sequence[str] = NAMES) -> None:
    for name in names:
        for request in requests(name):
            received = uvloop.run(send(server.address, request))
            assert received.startswith((b"HTTP/1.1 3", b"HTTP/1.1 4")), (request[:200], received[:300])
        call(server, name)


def foreign(record: Path, since: int, folder: Path) -> list[str]:
    """Return the paths that were opened and are neither in the models folder nor the service's own."""
    own = (str(folder), str(ROOT), sys.prefix, sys.base_prefix, *ALLOWED)
    opened = record.read_bytes()[since:].decode(errors="surrogateescape").splitlines()
    return [path for path in opened if not path.startswith(own) or ".." in Path(path).parts or MARK in path]


def test_names_of_clients_open_nothing_outside_of_the_models_folder(library: Path, tmp_path: Path) -> None:
    with recorded(library, tmp_path) as (server, record):
        # The first requests of each kind may load code.
        send_names(server, [MARK])
        assert server.client.post("/v2/repository/models/words/load", json={}).status_code == 200
        assert str(tmp_path / "models" / "words" / "1" / "model.toml") in record.read_text(), "the record has what is opened"
        since = record.stat().st_size
        send_names(server)
        assert foreign(record, since, tmp_path / "models") == []
        assert server.infer("words", ["how far"]).status_code == 200
