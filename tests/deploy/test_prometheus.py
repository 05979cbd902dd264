"""Prometheus' programs accept the shipped files, and a Prometheus that scrapes a busy server has data for every panel."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from service.access.keys import create
from service.access.scopes import Scope
from service.metrics import FAULTS
from tests.deploy.shipped import (
    DEPLOY,
    alerts,
    dashboard,
    exemplar_expressions,
    exposed,
    expressions,
    named,
    program,
    read,
    recorded,
    rules,
)
from tests.deploy.watching import Prometheus, Tokens, callers, finite, watching
from tests.serving import Server, eventually, serving
from tests.tracer.receiver import receiving

CALM_SECONDS = 2.5
"""How long the server runs before its engine is killed, and again after the restart."""
VARIABLES = {"$model": ".*", "$__rate_interval": "5s", "$__range": "30s"}


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Watched(NamedTuple):
    """A Prometheus that scraped a server from `start` to `end`, on its own clock."""

    prometheus: Prometheus
    server: Server
    start: float
    end: float

    def values(self, expression: str) -> list[float]:
        return self.prometheus.values(expression, self.start, self.end)


@pytest.fixture(scope="module")
def watched(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A server with keys under load. Its engine is killed until Prometheus has seen that the service is not ready."""
    folder = tmp_path_factory.mktemp("prometheus")
    program("prometheus")
    tokens = Tokens.create(folder / "keys.toml")
    (folder / "metrics-key").write_text(tokens.operator)
    with (
        serving(models_folder, folder, "--keys", str(folder / "keys.toml")) as server,
        watching(folder, server.address, authorization={"credentials_file": "metrics-key"}) as prometheus,
    ):
        server.client.headers["authorization"] = f"Bearer {tokens.operator}"
        with callers(server, tokens):
            eventually(lambda: prometheus.get("query", query="up == 1")["result"])
            start = prometheus.now()
            time.sleep(CALM_SECONDS)
            killed = server.pid("engine-0")
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: not server.ready())
            eventually(lambda: server.pid("engine-0") != killed)
            os.kill(server.pid("engine-0"), signal.SIGKILL)
            while not prometheus.get("query", query="seqserve_ready == 0")["result"]:
                if server.ready():
                    os.kill(server.pid("engine-0"), signal.SIGKILL)
                time.sleep(0.1)
            eventually(server.ready)
            time.sleep(CALM_SECONDS)
            calm = 'seqserve_ready == 1 and on() sum(rate(seqserve_stage_seconds_sum{stage="encode"}[5s])) > 0'
            eventually(lambda: prometheus.get("query", query=calm)["result"])
        # The values end with a step that sees what was seen last.
        yield Watched(prometheus, server, start, prometheus.now() + 1.0)


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


def test_prometheus_scrapes_a_server_with_keys(models_folder: Path, tmp_path: Path) -> None:
    program("prometheus")
    keys, [scrape] = tmp_path / "keys.toml", yaml.safe_load(with_access())["scrape_configs"]
    authorization = scrape["authorization"]
    (tmp_path / authorization["credentials_file"]).write_text(create(keys, "prometheus", [Scope.METRICS], "monitoring"))
    with (
        serving(models_folder, tmp_path, "--keys", str(keys)) as server,
        watching(tmp_path, server.address, authorization=authorization) as prometheus,
    ):
        eventually(lambda: prometheus.get("query", query='up{job="seqserve"} == 1')["result"])


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


@pytest.mark.parametrize("expression", expressions().values(), ids=list(expressions()))
def test_every_panel_has_data(expression: str, watched: Watched) -> None:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression
    assert finite(watched.values(expression))


def test_panels_of_traced_requests_have_their_exemplars(models_folder: Path, tmp_path: Path) -> None:
    program("prometheus")
    queries = [query.replace("$model", "words").replace("$__rate_interval", "5s") for query in exemplar_expressions().values()]
    assert queries
    with (
        receiving("grpc") as receiver,
        serving(models_folder, tmp_path, trace_endpoint=receiver.endpoint, trace_rate="0") as server,
        watching(tmp_path, server.address) as prometheus,
    ):
        request = {"model": "words", "inputs": ["how far is the sea ?"]}
        answer = server.client.post("/infer", json=request, headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})
        assert answer.status_code == 200
        for query in queries:

            def found(query: str = query) -> Any:
                return prometheus.get("query_exemplars", query=query, start=prometheus.now() - 600, end=prometheus.now())

            eventually(found)
            [series] = found()
            assert series["exemplars"][0]["labels"] == {"trace_id": TRACE}
            assert series["seriesLabels"]["stage"] == "total"


def test_every_model_can_be_selected(watched: Watched) -> None:
    [variable] = dashboard()["templating"]["list"]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
    assert found
    values = watched.prometheus.get(f"label/{found[2]}/values", **{"match[]": found[1]})
    assert {"words", "sensors"} <= set(values)


def test_every_rule_is_evaluated_without_an_error(watched: Watched) -> None:
    evaluated = [rule for group in watched.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in evaluated] == [rule.get("alert") or rule["record"] for rule in rules()]
    assert {rule["health"] for rule in evaluated} == {"ok"}


def test_first_restart_is_an_increase(watched: Watched) -> None:
    restarts = 'increase(seqserve_process_restarts_total{process="engine", reason="ended"}[30s])'
    assert max(finite(watched.values(restarts))) >= 1


def test_scrapes_succeed_while_an_engine_restarts(watched: Watched) -> None:
    up = watched.values('up{job="seqserve"}')
    assert statistics.mean(up) > 0.8, "a busy machine may delay some scrapes for longer than their second"


def test_client_errors_are_counted_but_not_as_failures(watched: Watched) -> None:
    for outcome in ("unknown_model", "invalid_input", "client_gone", "deadline_exceeded"):
        assert max(finite(watched.values(f'sum(rate(seqserve_requests_total{{outcome="{outcome}"}}[5s]))'))) > 0, outcome


def test_ready_is_0_while_the_only_engine_restarts(watched: Watched) -> None:
    ready = watched.values("seqserve_ready")
    assert ready[0] == ready[-1] == 1
    assert 0 in ready


def test_stage_times_add_up_to_less_than_the_total(watched: Watched) -> None:
    seconds = "sum(increase(seqserve_stage_seconds_sum{%s}[10s]))"
    parts, whole = (watched.values(seconds % match)[-1] for match in ('stage=~"parse|encode"', 'stage="total"'))
    assert 0 < parts < whole
