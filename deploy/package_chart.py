"""Write the Helm chart with the schema of its values: `python -m deploy.package_chart FOLDER`, which `make chart` runs.

The schema has every value of values.yaml, with the type of its default and the limits below, and the settings of the service. Helm then
refuses unknown names and wrong types. `helm install` and `helm package` take the folder.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from service.settings import Settings

Schema = dict[str, Any]
CHART = Path(__file__).resolve().parent / "chart"
OWNED = {
    *("host", "port", "grpc_port", "admin_port", "health_port", "allowed_hosts"),
    *("models", "cache", "device", "start_seconds", "lame_duck_seconds", "drain_seconds"),
    *("replicated", "session_store"),
    *("insecure", "keys", "state_keys", "tls_cert", "tls_key", "tls_client_ca"),
}
"""Settings that the chart sets from other values, or that its probes could not work with."""
TYPES = {bool: "boolean", int: "integer", str: "string"}
NAME = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", "maxLength": 253}
FILE = {"type": "string", "pattern": "^[-._a-zA-Z0-9]+$"}
QUANTITY = {"type": ["string", "integer", "number"]}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION = {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}
PERCENT = {"type": "integer", "minimum": 1, "maximum": 100}
AT_LEAST_1 = {"type": "integer", "minimum": 1}
PORT = {"type": "integer", "minimum": 0, "maximum": 65535, "not": {"enum": [8000, 8001]}}
PULL_POLICY = {"enum": ["Always", "IfNotPresent", "Never"]}
VARIABLES = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "value": {"type": "string"}, "valueFrom": {"type": "object"}},
        "additionalProperties": False,
    },
}
LIMITS: dict[str, Schema] = {
    **dict.fromkeys(("secret", "serviceAccountName", "priorityClassName", "gpu.runtimeClassName"), NAME),
    **dict.fromkeys(("claim.name", "cache.claim", "keda.authentication"), NAME),
    **dict.fromkeys(("file", "entry"), FILE),
    **dict.fromkeys(("interval", "scrapeTimeout"), DURATION),
    **dict.fromkeys(("requests", "limits"), QUANTITIES),
    **dict.fromkeys(("labels", "annotations", "podLabels", "podAnnotations", "nodeSelector"), STRINGS),
    **dict.fromkeys(("adminPort", "healthPort"), PORT),
    **dict.fromkeys(("busyPercent", "sessionPercent"), PERCENT),
    **dict.fromkeys(("timing.start", "timing.drain", "minReplicas", "maxReplicas", "pods"), AT_LEAST_1),
    **dict.fromkeys(("backlogMilliseconds", "pollingInterval"), AT_LEAST_1),
    **dict.fromkeys(("extraEnv", "env"), VARIABLES),
    "sizeLimit": QUANTITY,
    "pullPolicy": PULL_POLICY,
    "image.repository": {"type": "string", "minLength": 1},
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "pullSecrets": {"type": "array", "items": NAME},
    "allowedHosts": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "models.from": {"enum": ["image", "claim", "imageVolume", "init"]},
    "command": {"type": "array", "items": {"type": "string"}},
    "gpu.resource": {"type": "string", "pattern": "^[a-z0-9.-]+/[a-zA-Z0-9._-]+$"},
    "gpu.count": {"type": "integer", "minimum": 1, "maximum": 16},
    "timing.margin": {"type": "integer", "minimum": 8},
    "autoscaling.by": {"enum": ["none", "hpa", "keda"]},
    "stabilizationSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
    "periodSeconds": {"type": "integer", "minimum": 1, "maximum": 1800},
    "serverAddress": {"type": "string", "pattern": "^https?://"},
    "service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "networkPolicy.prometheus": {"type": "array", "items": {"type": "object"}, "minItems": 1},
    "affinity": {"type": "object"},
    "seccompProfile": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"type": {"enum": ["RuntimeDefault", "Localhost"]}, "localhostProfile": {"type": "string"}},
        "required": ["type"],
    },
}
"""Schemas of values that need more than the type of their default. A key is a name, or the names of the parent and the value."""


def values_schema(values: dict[str, Any]) -> Schema:
    """Return the schema of the chart's values. values: the defaults."""
    schema = _schema("", values)
    schema["properties"] |= {"settings": _settings_schema(), "global": {"type": "object"}}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart seqserve", **schema}


def _schema(path: str, default: Any) -> Schema:
    """Return the schema of a value. path: the names of its parent and of itself."""
    name = path.rpartition(".")[2]
    limits = LIMITS.get(path) or LIMITS.get(name)
    if limits is not None:
        return limits
    if isinstance(default, dict):
        properties = {key: _schema(f"{name}.{key}" if name else key, value) for key, value in default.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}
    if isinstance(default, list):
        return {"type": "array", "items": {"type": "object"}}
    schema: Schema = {"type": TYPES[type(default)]}
    return schema | {"minimum": 0} if schema["type"] == "integer" else schema


def _settings_schema() -> Schema:
    """Return the schema of `settings`: every setting that the chart does not set itself, and no other name."""
    properties = Settings.model_json_schema()["properties"]
    free = {name: _scalar(schema) for name, schema in properties.items() if name not in OWNED}
    return {"type": "object", "additionalProperties": False, "properties": free}


def _scalar(schema: Schema) -> Schema:
    """Return the schema of a setting, with its description."""
    return {key: value for key, value in schema.items() if key not in ("title", "default", "format")}


def package(folder: Path) -> None:
    """Copy the chart into a new folder. Links become the files to which they point."""
    shutil.copytree(CHART, folder)
    schema = values_schema(yaml.safe_load((CHART / "values.yaml").read_text()))
    (folder / "values.schema.json").write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    package(Path(sys.argv[1]))
