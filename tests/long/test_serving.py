"""Every server of the comparison answers with the scores of the model. `make loadtest SCENARIO=serving` installs the servers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.comparison.contenders import SERVERS, Server


@pytest.mark.server
@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_server_answers_every_request_rightly(server: Server, tmp_path: Path) -> None:
    if reason := server.why_skipped():
        pytest.skip(reason)
    cores = os.sched_getaffinity(0)
    load = ["--callers", "1", "8", "--rates", "50", "--seconds", "1", "--rounds", "1", "--logs", str(tmp_path / "logs")]
    try:
        assert main(["serving", "--servers", server.name, *load, "--out", str(tmp_path)]) == 0
    finally:
        os.sched_setaffinity(0, cores)
    [path] = tmp_path.glob("serving-*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert not [record["skipped"] for record in records if "skipped" in record]
    assert len(records) == 2 * 3 * len(server.endpoints) + 2 * server.constant
    assert all(record["answers"] > 0 == record["failed"] for record in records)
