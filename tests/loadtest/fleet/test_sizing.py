"""Sizes follow from the measurements, and docs/sizing.md shows the results of the simulation and the measurements."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.fleet import check, machines
from loadtest.fleet.machines import KINDS, SOURCES, Machine
from loadtest.fleet.plan import FleetPlan
from loadtest.fleet.sizing import Load, replicas_for
from loadtest.fleet.states import lstm_file_bytes
from loadtest.fleet.tables import number, tables
from loadtest.report import RESULTS
from loadtest.scenarios import simulate_fleet
from tests.models import SENSORS_HIDDEN
from tests.serving import Server

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "sizing.md").read_text()
RECORDS = machines.load(RESULTS / simulate_fleet.NAME)
MACHINE = Machine("test", "test", "2026-11-24", "session", 1000.0, 0.001, 1e-4, 1e-4, ((300.0, 0.01), (600.0, 0.04)), 1, 2)
LOAD = Load(streams=0, rate=7000.0)


def test_rate_latency_and_sessions_each_need_replicas() -> None:
    needed = replicas_for(LOAD, MACHINE)
    assert needed == {"rate": 10, "p99": 12, "sessions": 0, "total": 18}
    strict = replicas_for(replace(LOAD, p99_ms=20.0), MACHINE)
    assert strict["p99"] == 24
    many = replicas_for(replace(LOAD, streams=409_600), MACHINE)
    assert many["sessions"] > 100 and many["total"] >= 1.5 * many["sessions"]


def test_limit_that_no_measurement_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="10 ms or more"):
        replicas_for(replace(LOAD, p99_ms=5.0), MACHINE)
    few = ["--streams", "10", "--rate", "10", "--replicas", "1", "--p99-ms", "0.001", "--out", str(tmp_path)]
    assert main(["simulate", "fleet", *few]) == 2


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("request_kind", KINDS)
def test_machines_have_medians_of_committed_measurements(name: str, request_kind: str) -> None:
    machine = machines.read(name, request_kind)
    rates = [record["answers/s"] for record in machines.load(RESULTS / SOURCES[name].file) if record["request"] == request_kind]
    assert min(rates) < machine.rate <= max(rates)
    assert machine.levels and machine.alone > 0


def test_page_shows_the_tables_of_the_committed_figures() -> None:
    for name, table in tables(RECORDS, check.checks()).items():
        assert table in PAGE, f"docs/sizing.md has another table {name}: run `make simulate PART=fleet` and copy its table"


def test_committed_figures_are_those_of_the_simulation() -> None:
    """Up to 30 replicas, without the days: these take seconds. The options have the defaults of the command."""
    parser = argparse.ArgumentParser()
    simulate_fleet.add_options(parser)
    few = replace(simulate_fleet.plan_of(parser.parse_args([])), replicas=(1, 3, 10, 30))
    again = list(few.records(days=False))
    committed = [record for record in RECORDS if record["part"] != "autoscaling" and record.get("replicas", 0) <= 30]
    assert json.loads(json.dumps(again)) == committed


def test_other_prices_change_the_cost_alone() -> None:
    plan = FleetPlan(LOAD, prices=(("H200", 4.0),))
    [first, *_], [second, *_] = ([*each.machines()] for each in (plan, replace(plan, prices=(("H200", 8.0),))))
    assert second["cost_a_million"] == pytest.approx(2 * first["cost_a_million"], rel=0.01)
    assert first["cost_a_million"] == pytest.approx(first["replicas_total"] * 4.0 / (LOAD.rate * 3600) * 1e6, rel=0.01)
    assert first["replicas_total"] == second["replicas_total"]


def test_state_file_is_as_large_as_the_service_writes(server: Server) -> None:
    """The names and numbers in the header differ by a few characters."""
    assert server.infer("sensors", [[[0.1, 0.2, 0.3]]], session="as-large").status_code == 200
    written = server.client.get("/sessions/as-large/state").content
    server.client.delete("/sessions/as-large/state")
    assert len(written) == pytest.approx(lstm_file_bytes(SENSORS_HIDDEN, layers=2), abs=32)


@pytest.mark.parametrize(
    "value, text", [(None, ""), (0, "0"), (0.1234, "0.123"), (12.0, "12"), (123.4, "123"), (12345.6, "12,346")]
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text
