"""POST /debug/trace on two engines. `make test-all` runs this folder."""

from __future__ import annotations

from pathlib import Path

from tests import traces
from tests.frontend.rest.test_debug import SENSORS, WORDS, trace
from tests.serving import answering, serving


def test_trace_has_a_process_for_every_engine(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, "--debug", "--device", "cpu,cpu") as both:
        with answering(both, WORDS, WORDS, SENSORS, SENSORS):
            answer = trace(both, batches=10)
        processes = traces.processes(answer.json())
    assert list(processes) == ["engine-0 cpu", "engine-1 cpu"]
    assert [len([event for event in rows["batches"] if event.args]) for rows in processes.values()] == [10, 10]
