"""Read the files of deploy/ for the tests of this folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.metrics import Counter, Gauge, Histogram, Metrics, Series

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
SUFFIXES: dict[type[Series], tuple[str, ...]] = {Counter: ("_total",), Gauge: ("",), Histogram: ("_bucket", "_count", "_sum")}


def program(name: str) -> str:
    """Return the path of a program of Prometheus. Skips the test if it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: install Debian's package prometheus")
    return found


def read(name: str) -> Any:
    """Return the content of a YAML or JSON file of deploy/."""
    text = (DEPLOY / name).read_text()
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def rules() -> list[dict[str, Any]]:
    return [rule for group in read("rules.yml")["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def dashboard() -> dict[str, Any]:
    shown: dict[str, Any] = read("grafana/dashboards/seqserve.json")
    return shown


def panels() -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = dashboard()["panels"]
    return shown


def expressions() -> dict[str, str]:
    """Return every expression of the dashboard, by panel and letter."""
    return {f"{one['id']} {one['title']} {each['refId']}": each["expr"] for one in panels() for each in one.get("targets", [])}


def named(expression: str) -> set[str]:
    """Return the series of the service in an expression. Quoted text is a label value."""
    return set(re.findall(r"\bseqserve[\w:]*", re.sub(r'"[^"]*"', "", expression)))


def exposed() -> set[str]:
    """Return the name of every sample that the service exposes."""
    return {one.name + suffix for one in Metrics().series() for suffix in SUFFIXES[type(one)]}


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}
