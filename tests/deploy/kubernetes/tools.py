"""Run tool.py in its environment, and render the chart once with every set of values that the tests use."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.package_chart import CHART, package

ROOT = Path(__file__).resolve().parent.parent.parent.parent
KSERVE = ROOT / "deploy" / "kserve"
PYTHON = ROOT / ".venv-kubernetes" / "bin" / "python"
TOOL = Path(__file__).resolve().parent / "tool.py"
VERSIONS = ("1.34", "1.37")
"""Versions of Kubernetes whose schemas the objects have to match."""
Object = dict[str, Any]
MINIMAL = {
    "access": {"insecure": True},
    "networkPolicy": {"enabled": False},
    "disruptionBudget": {"enabled": False},
    "replicas": 1,
}
"""Values that make as few objects as possible."""


def run(request: Mapping[str, Any]) -> Any:
    """Return the reply of tool.py. Skips the test without its environment."""
    if not PYTHON.exists():
        pytest.skip("needs Helm and the schemas of Kubernetes: make .venv-kubernetes/installed")
    done = subprocess.run([PYTHON, TOOL], input=json.dumps(request), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def render(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return Helm's result for each set of values, by name: objects, notes and lint, or an error."""
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(folder) / "chart"
        package(chart)
        replies: dict[str, Any] = run({"chart": str(chart), "render": values})
    return replies


def validate(objects: Sequence[Object]) -> list[list[str]]:
    """Return the errors of each object, by the schema of its kind."""
    errors: list[list[str]] = run({"validate": objects, "versions": VERSIONS})
    return errors


def examples() -> dict[str, Any]:
    """Return the sets of values that the chart ships, and a minimal set."""
    shipped = {file.stem: yaml.safe_load(file.read_text()) for file in sorted((CHART / "examples").glob("*.yaml"))}
    return {**shipped, "minimal": MINIMAL}


EXAMPLES = tuple(sorted([*(file.stem for file in (CHART / "examples").glob("*.yaml")), "minimal"]))


@cache
def rendered_examples() -> dict[str, Any]:
    return render(examples())


def objects_of(example: str) -> list[Object]:
    """Return a copy of the objects of an example, which a test may change."""
    rendered: list[Object] = json.loads(json.dumps(rendered_examples()[example]["objects"]))
    return rendered


@cache
def validated_examples() -> dict[str, list[list[str]]]:
    """Return the errors of each object of each example."""
    errors = iter(validate([each for example in EXAMPLES for each in objects_of(example)]))
    return {example: [next(errors) for _ in objects_of(example)] for example in EXAMPLES}


def kserve_objects() -> dict[str, Object]:
    """Return the shipped objects of KServe by kind and name."""
    objects = [each for file in sorted(KSERVE.glob("*.yaml")) for each in yaml.safe_load_all(file.read_text())]
    return {f"{each['kind']} {each['metadata']['name']} {place}": each for place, each in enumerate(objects)}
