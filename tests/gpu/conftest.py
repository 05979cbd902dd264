"""Everything in this folder needs a GPU and says so when it is skipped."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and torch sees none")
