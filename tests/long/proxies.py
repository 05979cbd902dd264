"""Reverse proxies in front of the service, each configured to keep one connection to it and to forward as much as it can."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.servers import free_port
from tests import proxies

NGINX = """
daemon off;
user root;
worker_processes 1;
pid {scratch}/pid;
error_log {scratch}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {scratch}/body;
    proxy_temp_path {scratch}/proxy;
    fastcgi_temp_path {scratch}/fastcgi;
    uwsgi_temp_path {scratch}/uwsgi;
    scgi_temp_path {scratch}/scgi;
    ignore_invalid_headers off;
    underscores_in_headers on;
    map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
    upstream service {{ server 127.0.0.1:{service}; keepalive 1; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://service;
            proxy_http_version 1.1;
            proxy_request_buffering off;
            proxy_next_upstream off;
            proxy_set_header Host $http_host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
        }}
    }}
}}
"""
HAPROXY = """
global
    nbthread 1
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    retries 0
    http-reuse always
    option accept-invalid-http-request
frontend clients
    bind 127.0.0.1:{port}
    default_backend service
backend service
    option accept-invalid-http-response
    server service 127.0.0.1:{service}
"""


@contextmanager
def proxy(name: str, service: int, scratch: Path) -> Iterator[int]:
    """Run a proxy in front of a port of this machine. Yields the proxy's port."""
    port = free_port()
    with proxies.running(name, proxies.arguments(name, _written(name, service, port, scratch)), port, scratch):
        yield port


def _written(name: str, service: int, port: int, scratch: Path) -> Path:
    """Write the proxy's configuration, and return its file."""
    file = scratch / f"{name}.conf"
    if name == "envoy":
        file = file.with_suffix(".json")
        file.write_text(json.dumps(_envoy(service, port)))
    else:
        file.write_text((NGINX if name == "nginx" else HAPROXY).format(port=port, service=service, scratch=scratch))
    return file


def _envoy(service: int, port: int) -> dict[str, object]:
    route = {"match": {"prefix": "/"}, "route": {"cluster": "service"}}
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "codec_type": "HTTP1",
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    endpoint = {"endpoint": {"address": _address(service)}}
    cluster = {
        "name": "service",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "service", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    listener = {"name": "clients", "address": _address(port), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}
