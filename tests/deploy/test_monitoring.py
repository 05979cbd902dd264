"""The dashboard, the rules and docs/operations.md fit the metrics of the service and each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from service import metrics
from tests.deploy import shipped
from tests.deploy.shipped import DEPLOY, ROOT, exposed, read, rules
from tests.serving import Server

PAGE = (ROOT / "docs" / "operations.md").read_text()
DASHBOARD: dict[str, Any] = read(shipped.DASHBOARD)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
DRAWN = [panel for panel in PANELS if panel["type"] != "row"]
WITH_DATA = [panel for panel in DRAWN if "targets" in panel]
[SOURCE] = read("grafana/provisioning/datasources/prometheus.yml")["datasources"]
ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
COLUMNS = 24
VARIABLES = {"$model": ".*", "$__rate_interval": "5s", "$__range": "30s"}


def promtool(*arguments: str, input: str | None = None) -> None:
    """Check that Prometheus' tool accepts something."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is missing: install Debian's package prometheus")
    done = subprocess.run([program, *arguments], cwd=DEPLOY, input=input, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def queries() -> list[str]:
    return [target["expr"] for panel in WITH_DATA for target in panel["targets"]]


def within(part: Any, whole: Any) -> bool:
    """Return whether `whole` contains `part`, at any depth."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and within(value, whole[key]) for key, value in part.items())
    if isinstance(part, list):
        return isinstance(whole, list) and len(part) == len(whole) and all(map(within, part, whole))
    return bool(part == whole)


def test_series_of_rules_and_dashboard_exist() -> None:
    known = exposed() | {rule["record"] for rule in rules() if "record" in rule}
    for expression in [*queries(), *(rule["expr"] for rule in rules())]:
        named = set(re.findall(r"\bseqserve[\w:]*", re.sub(r'"[^"]*"', "", expression)))  # quoted text is the value of a label
        assert named and named <= known, expression


def test_faults_and_jobs_are_those_of_the_service() -> None:
    [failed] = [panel for panel in PANELS if panel["title"] == "Failed"]
    faults = f'outcome=~"{"|".join(metrics.FAULTS)}"'
    assert faults in failed["targets"][0]["expr"] and faults in ALERTS["SeqserveErrors"]["expr"]
    [job] = [one["job_name"] for one in read("prometheus.yml")["scrape_configs"]]
    assert {found for rule in rules() for found in re.findall(r'job="(.+?)"', rule["expr"])} == {job}


def test_dashboard_survives_grafana_s_schema() -> None:
    register_default_plugins()
    assert within(DASHBOARD, json.loads(json.dumps(Dashboard.from_json(DASHBOARD), cls=JSONEncoder)))
    assert DASHBOARD["uid"] == "seqserve" and "id" not in DASHBOARD
    assert DASHBOARD["refresh"] == read("prometheus.yml")["global"]["scrape_interval"] == SOURCE["jsonData"]["timeInterval"]


def test_panels_are_complete_and_do_not_overlap() -> None:
    known = {value for name, value in vars(units).items() if not name.startswith("_")}
    source = {"type": SOURCE["type"], "uid": SOURCE["uid"]}
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert [panel["title"] for panel in DRAWN if not (panel["title"] and panel["description"].endswith("."))] == []
    for panel in WITH_DATA:
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in known or unit.startswith("count:"), panel["title"]
        assert all(part["datasource"] == source for part in (panel, *panel["targets"])), panel["title"]
    for one, other in combinations([panel["gridPos"] | {"title": panel["title"]} for panel in PANELS], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert (beside or above) and one["x"] + one["w"] <= COLUMNS, (one["title"], other["title"])


def test_promtool_accepts_configuration_rules_and_queries(tmp_path: Path) -> None:
    """Also with the lines for services with keys and TLS, which are comments in the shipped file."""
    promtool("check", "config", "--lint=all", "--lint-fatal", "prometheus.yml")
    promtool("check", "rules", "--lint=all", "--lint-fatal", shipped.RULES)
    promtool("test", "rules", "rules_test.yml")
    text = re.sub(r"^    # ( *\w+:(?: \S+)?)$", r"    \1", (DEPLOY / "prometheus.yml").read_text(), flags=re.MULTILINE)
    assert {"authorization", "scheme", "tls_config"} <= yaml.safe_load(text)["scrape_configs"][0].keys()
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copytree(DEPLOY / "chart/files", tmp_path / "chart/files")
    for name in ("metrics-key", "authority.pem"):
        (tmp_path / name).touch()
    promtool("check", "config", "--lint=all", "--lint-fatal", str(tmp_path / "prometheus.yml"))
    filled = queries()
    for variable, value in VARIABLES.items():
        filled = [query.replace(variable, value) for query in filled]
    recorded = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(filled)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", str(tmp_path / "queries.yml"))


def test_promtool_accepts_the_exposed_metrics(server: Server) -> None:
    server.infer("words", ["how far is the sea ?"])
    # Triton chose the names of nv_inference.
    ours = [line for line in server.scrape().splitlines(keepends=True) if "nv_inference" not in line]
    promtool("check", "metrics", input="".join(ours))


# docs/operations.md


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def row(one: metrics.Series) -> str:
    """Return the row of a series in the table of the page."""
    name = f"{one.name}_total" if isinstance(one, metrics.Counter) else one.name
    labels = ", ".join(f"`{label}`" for label in one.labels)
    return f"| `{name}` | {type(one).__name__.lower()} | {labels} | {one.help} |"


def test_page_lists_every_series_and_label_value() -> None:
    table = PAGE.partition("## Metrics")[2]
    assert re.findall(r"^\| `seqserve_.+$", table, re.MULTILINE) == [row(one) for one in metrics.Metrics().series()]
    values = PAGE.partition("| label | values |")[2]
    sets = metrics.REFUSALS, metrics.DENIALS, metrics.CANCELLED_WHILE, metrics.ENGINE_WORK, metrics.SESSION_ENDS
    assert [word for word in chain(*sets, metrics.SESSION_MOVES, *metrics.RESTARTS) if f"`{word}`" not in values] == []


def test_alerts_lead_to_a_section_of_the_page() -> None:
    for name, alert in ALERTS.items():
        assert alert["labels"]["severity"] in ("warning", "critical") and f"### {name}\n" in PAGE
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}
        file, _, anchor = alert["annotations"]["runbook"].partition("#")
        assert anchor in anchors((ROOT / file).read_text()), name


def test_page_explains_the_rows_and_panels_of_the_dashboard() -> None:
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert re.findall(r"^\| ([A-Z].+?) \|", PAGE.partition("## Alerts")[0], re.MULTILINE) == rows
    assert set(re.findall(r'"([A-Z][a-z, ]+)"', PAGE)) <= {panel["title"] for panel in PANELS}
