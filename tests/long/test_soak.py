"""Mixed load through faults, with an account of every request. `python -m tests.long.soak --hours 8` runs it for longer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.accumulator import SMALL
from tests.long import scaled
from tests.long.clients import FAULTS
from tests.long.soak import soaked
from tests.serving import alive, descendants, eventually, idle
from tests.steady import open_files

CYCLE_SECONDS, END_SECONDS = 10.0, 2.0
CYCLES, ENDS = 30, 200

Show = Callable[[object], None]


def test_every_request_is_accounted_for_through_faults(tmp_path: Path, show: Show) -> None:
    with soaked(tmp_path) as (soak, _):
        assert soak.run(scaled(CYCLES, len(FAULTS) + 3) * CYCLE_SECONDS, CYCLE_SECONDS, show) == []


def test_200_ends_lose_nothing(tmp_path: Path, show: Show) -> None:
    """One engine and one frontend end in each cycle. The supervisor keeps neither descriptors nor processes."""
    with soaked(tmp_path, seed=1) as (soak, server):
        eventually(lambda: idle(server))
        files, cycles = open_files(server)["supervisor"], scaled(ENDS / 2)
        assert [fault for _ in range(cycles) for fault in soak.cycle("end both", END_SECONDS)] == []
        show(f"{dict(soak.ends)}, {soak.losses} sessions lost")
        assert len(server.events("child ended")) == 2 * cycles and soak.losses
        eventually(lambda: idle(server) and open_files(server)["supervisor"] == files)
        assert all(map(alive, descendants(server.process.pid)))


def test_sums_of_many_sessions_are_exact_with_few_state_slots(tmp_path: Path, show: Show) -> None:
    """Batches are small, and states move to the host and back, while clients hang up and versions are replaced."""
    with soaked(tmp_path, crowd=40, settings=SMALL) as (soak, server):
        assert [soak.cycle(fault, scaled(10 * CYCLE_SECONDS)) for fault in ("nothing", "hang up", "reload")] == [[]] * 3
        show(dict(soak.ends))
        assert server.metric("seqserve_session_moves_total", to="slot") > 100, "states came back from the host"
