"""Lists every operator of torch that can be imported, by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from service.importers.torch_archive import elementwise, layers, moves, packing, recurrent
from service.importers.torch_archive.operation import ArchiveOperation

OPERATORS: dict[str, Callable[[ArchiveOperation], Any]] = {
    **moves.OPERATORS,
    **elementwise.OPERATORS,
    **layers.OPERATORS,
    **packing.OPERATORS,
    **recurrent.OPERATORS,
}
