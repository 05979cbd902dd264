"""Write the settings of the service into the schema of the chart's values: `make chart-schema`.

The chart sets some settings itself, because they have to agree with other parts of a pod. The others can be set in `settings`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service.settings import Settings

SCHEMA = Path(__file__).resolve().parent.parent.parent.parent / "deploy" / "chart" / "values.schema.json"
OWNED = {
    *("host", "port", "grpc", "grpc_port", "admin_host", "admin_port", "health_port", "allowed_hosts"),
    *("models", "cache", "device", "start_seconds", "lame_duck_seconds", "drain_seconds"),
    *("replicated", "peers", "peer_keys", "peer_port", "checkpoints"),
    *("insecure", "keys", "state_keys", "tls_cert", "tls_key", "tls_client_ca"),
}
"""Settings that the chart sets from other values, or that its probes could not work with."""


def settings_schema() -> dict[str, Any]:
    """Return the schema of `settings`: every setting that the chart does not set itself, and no other name."""
    properties = Settings.model_json_schema()["properties"]
    free = {name: _scalar(schema) for name, schema in properties.items() if name not in OWNED}
    return {"type": "object", "additionalProperties": False, "properties": free}


def _scalar(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value, with its description."""
    return {key: value for key, value in schema.items() if key not in ("title", "default", "format")}


def with_settings(text: str) -> str:
    """Return the content of the schema file with the current settings."""
    schema = json.loads(text)
    schema["properties"]["settings"] = settings_schema()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(with_settings(SCHEMA.read_text()))
