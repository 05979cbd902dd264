"""The proxies with the files in deploy/proxies, in front of a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from loadtest.servers import free_ports
from tests import proxies
from tests.cluster.replicas import Cluster

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "proxies"
FILES = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg", "envoy": "envoy.yaml"}
REPLICAS = 3
"""Replicas in each file: seqserve-1 to seqserve-3."""
NGINX_PATHS = """
    client_body_temp_path {scratch}/body;
    proxy_temp_path {scratch}/proxy;
    fastcgi_temp_path {scratch}/fastcgi;
    uwsgi_temp_path {scratch}/uwsgi;
    scgi_temp_path {scratch}/scgi;
"""
"""Folders of nginx that a package would create."""
REPLICA_HEADER = "x-replica"
NAMING = {
    "haproxy": (r"^backend .*$", rf"\g<0>\n    http-response set-header {REPLICA_HEADER} %s"),
    "envoy": (
        r'^( *)domains: \["\*"\]$',
        rf"\g<0>\n\1response_headers_to_add: [{{header: {{key: {REPLICA_HEADER}, value: '%UPSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%'}}}}]",
    ),
}
"""By proxy, the change of a line in its file that lets each reply name its replica. Clients need no name, so shipped files lack it."""


class Front(NamedTuple):
    """The addresses of a proxy."""

    address: str
    grpc: str


@contextmanager
def shipped(name: str, cluster: Cluster, scratch: Path, *, naming: bool = False) -> Iterator[Front]:
    """Run a proxy with its shipped file. seqserve-1 is at the first address of the cluster, and so on.

    naming: each reply has the header x-replica, which identifies the replica.
    """
    http_port, grpc_port = free_ports(2)
    text = (FOLDER / FILES[name]).read_text()
    for number, host in enumerate(cluster.hosts[:REPLICAS], 1):
        for port, actual in ((8000, cluster.port), (8001, cluster.grpc_port)):
            text = text.replace(f"seqserve-{number}:{port}", f"{host}:{actual}")
            text = text.replace(f"address: seqserve-{number}, port_value: {port}", f"address: {host}, port_value: {actual}")
    for port, actual in ((8000, http_port), (8001, grpc_port)):
        text = text.replace(f"0.0.0.0:{port}", f"127.0.0.1:{actual}")
        text = text.replace(f"address: 0.0.0.0, port_value: {port}", f"address: 127.0.0.1, port_value: {actual}")
    text = text.replace("{port_value: 8000}", f"{{port_value: {cluster.port}}}")  # the health checks of gRPC
    if name == "nginx":
        text = re.sub("pid .*;", f"pid {scratch}/nginx.pid; daemon off; user root; error_log {scratch}/nginx-errors.log;", text)
        text = text.replace("http {", "http {" + NGINX_PATHS.format(scratch=scratch), 1)
    if naming:
        text, lines = re.subn(*NAMING[name], text, flags=re.MULTILINE)
        assert lines, "a header is added"
    settings = "\n".join(line.partition("#")[0] for line in text.splitlines())
    assert not re.search(r"\b(8000|8001|0\.0\.0\.0)\b|seqserve-\d:", settings), "every address is replaced"
    file = scratch / FILES[name]
    file.write_text(text)
    with proxies.running(name, proxies.arguments(name, file), http_port, scratch):
        yield Front(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}")
