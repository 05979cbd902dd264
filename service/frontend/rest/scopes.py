"""The scope of every endpoint, by transport."""

from __future__ import annotations

from collections.abc import Mapping

from service.access.scopes import Scope

_MODEL = "/v2/models/{name}"
_VERSIONED = _MODEL + "/versions/{version}"

HTTP_SCOPES: Mapping[str, Scope | Mapping[str, Scope]] = {
    "/healthz": Scope.PUBLIC,
    "/readyz": Scope.PUBLIC,
    "/v2/health/live": Scope.PUBLIC,
    "/v2/health/ready": Scope.PUBLIC,
    "/docs": Scope.PUBLIC,
    "/docs/{name}": Scope.PUBLIC,
    "/": Scope.PUBLIC,
    "/ui/{name}": Scope.PUBLIC,
    "/access": Scope.PUBLIC,
    "/metrics": Scope.METRICS,
    "/infer": Scope.INFER,
    "/models": Scope.INFER,
    "/models/{name}/card": Scope.INFER,
    "/tokens": Scope.INFER,
    "/v2": Scope.INFER,
    "/v2/": Scope.INFER,
    "/v2/models/stats": Scope.INFER,
    **{model + end: Scope.INFER for model in (_MODEL, _VERSIONED) for end in ("", "/infer", "/ready", "/config", "/stats")},
    "/v2/repository/index": Scope.INFER,
    "/v2/repository/models/{name}/load": Scope.ADMIN,
    "/v2/repository/models/{name}/unload": Scope.ADMIN,
    "/v2/systemsharedmemory/{rest:path}": Scope.INFER,
    "/v2/cudasharedmemory/{rest:path}": Scope.INFER,
    "/v2/trace/setting": Scope.INFER,
    _MODEL + "/trace/setting": Scope.INFER,
    "/v2/logging": Scope.INFER,
    "/stream": Scope.SESSION,
    "/sessions/{id:path}/state": {"GET": Scope.STATE, "PUT": Scope.STATE, "DELETE": Scope.SESSION},
    "/sessions/{id:path}/fork": Scope.SESSION,
    "/debug/trace": Scope.DEBUG,
}
"""By path, or by path and method. A path that is missing here cannot be added to the service. Endpoints of Triton that the service does
not have answer as inference does."""

ADMIN_PORT_SCOPES = frozenset((Scope.ADMIN, Scope.DEBUG, Scope.METRICS))
"""With an admin port, endpoints with these scopes are there, and nowhere else."""


def scopes_of(path: str) -> frozenset[Scope]:
    """Return the scopes of the methods of an HTTP path."""
    scopes = HTTP_SCOPES[path]
    return frozenset((scopes,)) if isinstance(scopes, Scope) else frozenset(scopes.values())


GRPC_SCOPES: Mapping[str, Scope] = {
    "ServerLive": Scope.PUBLIC,
    "ServerReady": Scope.PUBLIC,
    "RepositoryModelLoad": Scope.ADMIN,
    "RepositoryModelUnload": Scope.ADMIN,
    **dict.fromkeys(
        (
            "ModelInfer",
            "ModelStreamInfer",
            "ModelReady",
            "ModelMetadata",
            "ModelConfig",
            "ModelStatistics",
            "RepositoryIndex",
            "ServerMetadata",
            "SystemSharedMemoryStatus",
            "SystemSharedMemoryRegister",
            "SystemSharedMemoryUnregister",
            "CudaSharedMemoryStatus",
            "CudaSharedMemoryRegister",
            "CudaSharedMemoryUnregister",
            "TraceSetting",
            "LogSettings",
        ),
        Scope.INFER,
    ),
}
"""By the name of the method."""

_OTHER_GRPC_SERVICES = {"grpc.health.v1.Health": Scope.PUBLIC, "grpc.reflection.v1alpha.ServerReflection": Scope.INFER}


def grpc_scope(path: str) -> Scope:
    """Return the scope of the method at a path, which is /SERVICE/METHOD. A method that is missing here is for administrators."""
    service, _, method = path[1:].partition("/")
    return _OTHER_GRPC_SERVICES.get(service) or GRPC_SCOPES.get(method, Scope.ADMIN)
