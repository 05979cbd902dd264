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
TYPES = {bool: "boolean", int: "integer", str: "string", list: "array"}
QUANTITIES = {"type": "object", "additionalProperties": {"type": ["string", "integer", "number"]}}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
TEXTS = {"type": "array", "items": {"type": "string", "minLength": 1}}
AT_LEAST_1 = {"type": "integer", "minimum": 1}
PERCENT = {**AT_LEAST_1, "maximum": 100}
PORT = {"type": "integer", "minimum": 0, "maximum": 65535, "not": {"enum": [8000, 8001]}}
LIMITS: dict[str, Schema] = {
    **dict.fromkeys(("requests", "limits"), QUANTITIES),
    **dict.fromkeys(("labels", "annotations", "podLabels", "podAnnotations", "nodeSelector"), STRINGS),
    **dict.fromkeys(("pullSecrets", "allowedHosts", "command"), TEXTS),
    **dict.fromkeys(("adminPort", "healthPort"), PORT),
    **dict.fromkeys(("busyPercent", "sessionPercent"), PERCENT),
    **dict.fromkeys(("timing.start", "timing.drain", "minReplicas", "maxReplicas", "pods"), AT_LEAST_1),
    **dict.fromkeys(("backlogMilliseconds", "pollingInterval", "periodSeconds"), AT_LEAST_1),
    "sizeLimit": {"type": ["string", "integer", "number"]},
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "models.from": {"enum": ["image", "claim", "imageVolume", "init"]},
    "gpu.resource": {"type": "string", "pattern": "^[a-z0-9.-]+/[a-zA-Z0-9._-]+$"},
    "gpu.count": {**AT_LEAST_1, "maximum": 16},
    "timing.margin": {"type": "integer", "minimum": 8},
    "autoscaling.by": {"enum": ["none", "hpa", "keda"]},
    "networkPolicy.prometheus": {"type": "array", "items": {"type": "object"}, "minItems": 1},
    "affinity": {"type": "object"},
    "seccompProfile": {"type": "object", "properties": {"type": {"enum": ["RuntimeDefault", "Localhost"]}}},
}
"""Schemas of values that need more than the type of their default. A key is a name, or the names of the parent and the value. Kubernetes
itself refuses wrong names of objects, durations, pull policies and types of services."""


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
        return _object({key: _schema(f"{name}.{key}" if name else key, value) for key, value in default.items()})
    more: dict[str, Schema] = {"integer": {"minimum": 0}, "array": {"items": {"type": "object"}}}
    kind = TYPES[type(default)]
    return {"type": kind, **more.get(kind, {})}


def _settings_schema() -> Schema:
    """Return the schema of `settings`: every setting that the chart does not set itself, with its description, and no other name."""
    properties = Settings.model_json_schema()["properties"]
    unwanted = ("title", "default", "format")
    free = {name: schema for name, schema in properties.items() if name not in OWNED}
    return _object({name: {key: schema[key] for key in schema if key not in unwanted} for name, schema in free.items()})


def _object(properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def package(folder: Path) -> None:
    """Copy the chart into a new folder, with the schema of its values."""
    shutil.copytree(CHART, folder)
    schema = values_schema(yaml.safe_load((CHART / "values.yaml").read_text()))
    (folder / "values.schema.json").write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    package(Path(sys.argv[1]))
