"""Prometheus' tool accepts the shipped files, the queries of the dashboard and the exposed metrics."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from service.metrics import FAULTS
from tests.deploy.shipped import DEPLOY, alerts, exposed, expressions, named, program, read, recorded, rules
from tests.serving import Server

VARIABLES = {"$model": ".*", "$__rate_interval": "5s", "$__range": "30s"}


def promtool(*arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *arguments]
    return subprocess.run(command, cwd=DEPLOY, input=input, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "--lint=all", "--lint-fatal", "prometheus.yml"),
        ("check", "rules", "--lint=all", "--lint-fatal", "rules.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_shipped_files(arguments: tuple[str, ...]) -> None:
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def with_access() -> str:
    """Return the shipped configuration with its lines for services with keys and TLS, which are comments."""
    return re.sub(r"^    # ( *\w+:(?: \S+)?)$", r"    \1", (DEPLOY / "prometheus.yml").read_text(), flags=re.MULTILINE)


def test_promtool_accepts_the_lines_for_keys_and_tls(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(with_access())
    for name in ("rules.yml", "metrics-key", "authority.pem"):
        (tmp_path / name).write_text((DEPLOY / name).read_text() if name == "rules.yml" else "")
    [scrape] = yaml.safe_load(with_access())["scrape_configs"]
    assert {"authorization", "scheme", "tls_config"} <= scrape.keys()
    done = promtool("check", "config", "--lint=all", "--lint-fatal", str(tmp_path / "prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_exposed_metrics(server: Server) -> None:
    server.infer("words", ["how far is the sea ?"])
    # Triton chose these names.
    ours = [line for line in server.scrape().splitlines(keepends=True) if "nv_inference" not in line]
    done = promtool("check", "metrics", input="".join(ours))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("name", alerts())
def test_every_alert_has_severity_summary_and_runbook(name: str) -> None:
    assert alerts()[name]["labels"]["severity"] in ("warning", "critical")
    assert set(alerts()[name]["annotations"]) == {"summary", "description", "runbook"}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_series_of_a_rule_exists(rule: dict[str, str]) -> None:
    assert named(rule["expr"])
    assert named(rule["expr"]) <= exposed() | recorded()


def test_error_alert_counts_the_server_s_faults() -> None:
    counted = re.findall(r'outcome=~"(.+?)"', alerts()["SeqserveErrors"]["expr"])
    assert counted == ["|".join(FAULTS)]


def test_rules_use_the_scraped_job() -> None:
    [job] = [one["job_name"] for one in read("prometheus.yml")["scrape_configs"]]
    assert {found for rule in rules() for found in re.findall(r'job="(.+?)"', rule["expr"])} == {job}


def test_promtool_accepts_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    recorded_queries = []
    for number, query in enumerate(expressions().values()):
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        assert "$" not in query
        recorded_queries.append({"record": f"query:{number}", "expr": query})
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded_queries}]}))
    done = promtool("check", "rules", str(tmp_path / "queries.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
