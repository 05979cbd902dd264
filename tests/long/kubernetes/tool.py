"""Render the chart and validate objects of Kubernetes, in the environment of requirements.txt: its packages do not fit into the project's.

`python tool.py` reads one request as JSON from standard input and writes the reply as JSON to standard output:

{"chart": folder, "render": {name: values}}   for each name {"objects": [...], "notes": text, "lint": [messages]}, or {"error": text}
{"validate": [objects], "versions": [...]}    for each object the list of errors, over all versions of Kubernetes
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

RELEASE, NAMESPACE = "chart-test", "tests"


def render(folder: str, requests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return Helm's result for the chart with each set of values."""
    import helm_python as helm
    import yaml

    replies: dict[str, Any] = {}
    with helm.Chart.load(folder) as chart:
        for name, values in requests.items():
            try:
                chart.validate_schema(values)
                files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
            except helm.HelmError as error:
                replies[name] = {"error": str(error)}
                continue
            texts = {Path(file).name: text for file, text in files.items()}
            notes = texts.pop("NOTES.txt")
            objects = [each for text in texts.values() for each in yaml.safe_load_all(text) if each]
            lint = helm.lint(folder, values, strict=True)
            replies[name] = {
                "objects": objects,
                "notes": notes,
                "lint": [each for each in lint["messages"] if each["severity"] > 1],
            }
    return replies


def errors(made: dict[str, Any], versions: list[str]) -> list[str]:
    """Return the errors of an object, by the schema of its kind."""
    group = made["apiVersion"].partition("/")[0]
    if group in ("keda.sh", "monitoring.coreos.com"):
        return model_errors(group, made)
    return [error for version in versions for error in builtin_errors(made, version)]


def builtin_errors(made: dict[str, Any], version: str) -> list[str]:
    """Validate an object of a kind that Kubernetes has itself."""
    from kubernetes_validate import utils

    utils.schema_contents = cached_schema
    try:
        utils.validate(made, version, strict=True)
    except utils.ValidationError as error:
        return [f"{version}: {'.'.join(map(str, error.path))}: {error.message}"]
    except utils.SchemaNotFoundError as error:
        return [error.message]
    return []


def model_errors(group: str, made: dict[str, Any]) -> list[str]:
    """Validate an object with the typed model of its kind: it has to read every field, and to change none."""
    from pydantic import ValidationError

    name = {"keda.sh": "keda.v1alpha1", "monitoring.coreos.com": "prometheus_operator.v1"}[group]
    model = getattr(import_module(f"cloudcoil.models.{name}"), made["kind"])
    try:
        read = model.model_validate(made).model_dump(by_alias=True, exclude_unset=True, mode="json")
    except ValidationError as error:
        return [str(error)]
    return different(made, read, made["kind"])


def different(made: Any, read: Any, place: str) -> list[str]:
    """Return the places where a model dropped or changed a value. Models ignore fields that they do not know."""
    if isinstance(made, dict) and isinstance(read, dict):
        unknown = [f"{place}.{key} is unknown" for key in made.keys() - read.keys()]
        return unknown + [
            error for key in made.keys() & read.keys() for error in different(made[key], read[key], f"{place}.{key}")
        ]
    if isinstance(made, list) and isinstance(read, list) and len(made) == len(read):
        return [error for at, pair in enumerate(zip(made, read, strict=True)) for error in different(*pair, f"{place}[{at}]")]
    return [] if type(made) is type(read) and made == read else [f"{place} is {made!r}, which is read as {read!r}"]


@cache
def cached_schema(name: str, version: str) -> Any:
    """Return a schema file of kubernetes-validate, which would read it again for each object."""
    import kubernetes_validate

    return json.loads((Path(kubernetes_validate.__file__).parent / name).read_text())


def main() -> None:
    request = json.load(sys.stdin)
    if "render" in request:
        reply: Any = render(request["chart"], request["render"])
    else:
        reply = [errors(made, request["versions"]) for made in request["validate"]]
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
