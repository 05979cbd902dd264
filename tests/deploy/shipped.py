"""The files of deploy/ and what stands in them, for the tests of this folder."""

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
    """Where Prometheus' own programs are; skips the test where they are not."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: install Debian's package prometheus")
    return found


def read(name: str) -> Any:
    """One file of deploy/, YAML or JSON."""
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
    """Every expression of the dashboard, by panel and letter."""
    return {f"{one['id']} {one['title']} {each['refId']}": each["expr"] for one in panels() for each in one.get("targets", [])}


def named(expression: str) -> set[str]:
    """The series of the service that an expression names; what stands in quotes is the value of a label."""
    return set(re.findall(r"\bseqserve[\w:]*", re.sub(r'"[^"]*"', "", expression)))


def exposed() -> set[str]:
    """Every name under which the service shows a sample."""
    return {one.name + suffix for one in Metrics().series() for suffix in SUFFIXES[type(one)]}


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}
