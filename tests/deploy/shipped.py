"""Read the files of deploy/ for the tests of this folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import yaml

from service.metrics import Counter, Gauge, Histogram, Metrics, Series

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
RULES, DASHBOARD = "chart/files/rules.yml", "chart/files/dashboard.json"
COMPOSE, GPU = "docker-compose.yml", "docker-compose.gpu.yml"
SUFFIXES: dict[type[Series], tuple[str, ...]] = {Counter: ("_total",), Gauge: ("",), Histogram: ("_bucket", "_count", "_sum")}


class ComposeLoader(yaml.SafeLoader):
    """Reads YAML with the tag of compose for a list that replaces the list in the first file."""


ComposeLoader.add_constructor("!override", lambda loader, node: loader.construct_sequence(cast(yaml.SequenceNode, node)))


def read(name: str) -> Any:
    """Return the content of a YAML or JSON file of deploy/."""
    text = (DEPLOY / name).read_text()
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def services(file: str) -> dict[str, dict[str, Any]]:
    """Return the services of a compose file."""
    found: dict[str, dict[str, Any]] = yaml.load((ROOT / file).read_text(), ComposeLoader)["services"]
    return found


def instructions(name: str) -> list[str]:
    """Return the arguments of every instruction of this kind in the Dockerfile, with continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return re.findall(rf"^{name} (.+)$", whole, re.MULTILINE)


def rules() -> list[dict[str, Any]]:
    """Return the recording rules and the alerts."""
    return [rule for group in read(RULES)["groups"] for rule in group["rules"]]


def exposed() -> set[str]:
    """Return the name of every sample that the service exposes."""
    return {one.name + suffix for one in Metrics().series() for suffix in SUFFIXES[type(one)]}
