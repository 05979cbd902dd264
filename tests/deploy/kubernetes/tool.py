"""Render the chart and validate objects of Kubernetes, in the environment of requirements.txt: its packages do not fit into the project's.

`python tool.py` reads one request as JSON from standard input and writes the reply as JSON to standard output:

{"chart": folder, "render": {name: values}}   for each name {"objects": [...], "notes": text, "lint": [messages]}, or {"error": text}
{"validate": [objects], "versions": [...]}    for each object the list of errors, over all versions of Kubernetes
"""

from __future__ import annotations

import json
import re
import sys
import types
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RELEASE, NAMESPACE = "chart-test", "tests"
CORE = re.compile(r"V1([A-Z]\w+)")
GROUPED = re.compile(r"K8sIoApi([A-Z][a-z]+)(V\d)([A-Z]\w+)")
CONTAINER = re.compile(r"(list\[|dict\(str, )(.+)[\])]")
SCALARS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "object": (object,),
    "ResourceQuantity": (str, int),
    "V1beta1MetricQuantity": (str, int),
}


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
    if group == "serving.kserve.io":
        version = made["apiVersion"].partition("/")[2].capitalize()
        return kserve_errors(f"{version}{made['kind']}", made, made["kind"], versions)
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


def kserve_errors(kind: str, value: Any, place: str, versions: list[str]) -> list[str]:
    """Validate a value against a type in the OpenAPI document of KServe, from which its Python classes are generated."""
    if found := CONTAINER.fullmatch(kind):
        items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else None
        if items is None or isinstance(value, list) != (found[1] == "list["):
            return [f"{place} is {value!r} and should be {kind}"]
        return [error for at, item in items for error in kserve_errors(found[2], item, f"{place}[{at}]", versions)]
    if kind in SCALARS:
        wrong = not isinstance(value, SCALARS[kind]) or (isinstance(value, bool) and kind not in ("bool", "object"))
        return [f"{place} is {value!r} and should be {kind}"] if wrong else []
    model = getattr(kserve_models(), kind, None)
    if model is None:
        return core_errors(kind, value, place, versions)
    fields = {model.attribute_map[name]: type_ for name, type_ in model.openapi_types.items()}
    if not isinstance(value, dict):
        return [f"{place} is {value!r} and should be {kind}"]
    wrong_fields = [f"{place}.{key} is unknown" for key in value.keys() - fields.keys()]
    known = value.keys() & fields.keys()
    return wrong_fields + [
        error for key in sorted(known) for error in kserve_errors(fields[key], value[key], f"{place}.{key}", versions)
    ]


def core_errors(kind: str, value: Any, place: str, versions: list[str]) -> list[str]:
    """Validate a part of a pod, which KServe's objects take from Kubernetes."""
    import jsonschema
    from referencing import Registry, Resource

    if kind == "V1ObjectMeta":
        name = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
    elif found := GROUPED.fullmatch(kind):
        name = f"io.k8s.api.{found[1].lower()}.{found[2].lower()}.{found[3]}"
    elif found := CORE.fullmatch(kind):
        name = f"io.k8s.api.core.v1.{found[1]}"
    else:
        return [f"{place}: the type {kind} is unknown"]
    wrong = []
    for version in versions:
        definitions = cached_schema(f"kubernetes-json-schema/v{version}.0-local-strict/_definitions.json", version)
        registry = Resource.from_contents(definitions) @ Registry()
        schema = {"$ref": f"{definitions['$id']}#/$defs/{name}"}
        validator = jsonschema.Draft202012Validator(schema, registry=registry)
        wrong += [
            f"{version}: {place}.{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(value)
        ]
    return wrong


@cache
def kserve_models() -> types.ModuleType:
    """Import the generated classes of KServe without its server, which would need many more packages."""
    spec = find_spec("kserve")
    assert spec is not None and spec.submodule_search_locations is not None
    package = types.ModuleType("kserve")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["kserve"] = package
    return import_module("kserve.models")


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
