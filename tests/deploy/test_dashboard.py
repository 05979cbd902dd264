"""The dashboard loads in Grafana, and its panels are complete."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from service.metrics import FAULTS
from tests.deploy.shipped import dashboard, exposed, expressions, named, panels, read, recorded

COLUMNS = 24
UNITS = {value for name, value in vars(units).items() if not name.startswith("_")}
A_COUNT_OF_ITS_OWN = "count:"
DRAWN = [panel for panel in panels() if panel["type"] != "row"]
WITH_DATA = [panel for panel in DRAWN if "targets" in panel]


def title(panel: dict[str, Any]) -> str:
    return str(panel["title"])


def within(part: Any, whole: Any) -> bool:
    """Return whether `whole` contains `part`, at any depth."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and within(value, whole[key]) for key, value in part.items())
    if isinstance(part, list):
        return isinstance(whole, list) and len(part) == len(whole) and all(map(within, part, whole))
    return bool(part == whole)


def provisioned() -> dict[str, Any]:
    [source] = read("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert isinstance(source, dict)
    return source


@pytest.mark.parametrize("panel", [*DRAWN, {**dashboard(), "panels": []}], ids=title)
def test_dashboard_survives_grafana_s_schema(panel: dict[str, Any]) -> None:
    register_default_plugins()
    said = {**dashboard(), "panels": [panel]} if "gridPos" in panel else panel
    assert within(said, json.loads(json.dumps(Dashboard.from_json(said), cls=JSONEncoder)))


def test_dashboard_has_its_uid_and_the_scrape_interval() -> None:
    shown = dashboard()
    assert shown["uid"] == "seqserve"
    assert "id" not in shown, "a number that Grafana gives"
    assert shown["refresh"] == read("prometheus.yml")["global"]["scrape_interval"] == provisioned()["jsonData"]["timeInterval"]


def test_panel_ids_are_unique() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_panels_do_not_overlap() -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in panels()]
    for name, place in places:
        assert place["x"] + place["w"] <= COLUMNS, name
    for (name, one), (other_name, other) in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, f"{name} and {other_name}"


@pytest.mark.parametrize("panel", DRAWN, ids=title)
def test_every_panel_has_a_description(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert len(panel["description"]) < 200


@pytest.mark.parametrize("panel", WITH_DATA, ids=title)
def test_every_panel_has_a_known_unit(panel: dict[str, Any]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert unit in UNITS or unit.startswith(A_COUNT_OF_ITS_OWN)


@pytest.mark.parametrize("panel", WITH_DATA, ids=title)
def test_queries_use_the_provisioned_data_source(panel: dict[str, Any]) -> None:
    source = {"type": provisioned()["type"], "uid": provisioned()["uid"]}
    assert panel["datasource"] == source
    assert all(target["datasource"] == source for target in panel["targets"])
    letters = [target["refId"] for target in panel["targets"]]
    assert len(set(letters)) == len(letters)


def test_alert_list_and_variables_use_the_data_source() -> None:
    [alerts] = [panel for panel in panels() if panel["type"] == "alertlist"]
    [models] = dashboard()["templating"]["list"]
    assert alerts["options"]["datasource"] == provisioned()["name"]
    assert models["datasource"]["uid"] == provisioned()["uid"]
    assert models["name"] == "model"
    assert models["includeAll"]


@pytest.mark.parametrize("expression", expressions().values(), ids=list(expressions()))
def test_every_series_of_the_dashboard_exists(expression: str) -> None:
    assert named(expression)
    assert named(expression) <= exposed() | recorded()


def test_failed_panel_counts_the_server_s_faults() -> None:
    [failed] = [panel for panel in panels() if panel["title"] == "Failed"]
    assert f'outcome=~"{"|".join(FAULTS)}"' in failed["targets"][0]["expr"]
