"""Five minutes of the soak: mixed load with a fault every ten seconds. `python -m tests.long.soak --hours 8` runs it for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models
from tests.long import soak
from tests.serving import serving

SECONDS, CYCLE_SECONDS = 300.0, 10.0


def test_every_request_is_accounted_for_through_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "models"
    models.accumulator(root)
    with serving(root, tmp_path, *soak.FLAGS) as server, capsys.disabled():
        print()
        assert soak.run(server, root, SECONDS, CYCLE_SECONDS, 0, print) == []
