"""The launcher of gate_inputs.cu, which computes a layer from gate inputs in memory, or from rows of tables that ids select."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels.compile import shared_limit
from kernels.launching import round_up
from kernels.scan.forms import ScanForm
from kernels.scan.layer import ScanVariant
from kernels.scan.shape import ALIGNED, STAGES, TILE, ScanShape

RUN = 32
"""Steps that a thread computes before it hands its cell over."""


def gate_inputs_constants(variant: ScanVariant, shape: ScanShape) -> Mapping[str, int]:
    """Return the constants of gate_inputs.cu that depend on how it reads the gates. STAGES is 0 if shared memory is too small."""
    limit = shared_limit(variant.device)
    stages = next((count for count in STAGES if _shared_bytes(variant, shape, count) <= limit), 0)
    # A group that is a whole rotation of buffers ahead would take the previous tile of a buffer for its own.
    groups = min(shape.groups, stages * TILE // RUN)
    gates = variant.gates
    return {
        "THREADS": 128 + 2 * groups * shape.units,
        "GROUPS": groups,
        "RUN": RUN,
        "STAGES": stages,
        "SHARED": _shared_bytes(variant, shape, stages),
        "TAPS": gates.window,
        "GATHER": int(gates.gather),
        "FIRST_LINE": int(gates.gather and not variant.form.sru),
        "GATES_FLOAT32": int(gates.float32),
        "PIECE_BYTES": gates.piece_bytes,
        "ALL_BLOCKS": int(_reads_all_blocks(variant)),
        "EXACT": int(variant.storage == torch.float32),
    }


def _shared_bytes(variant: ScanVariant, shape: ScanShape, stages: int) -> int:
    blocks = variant.form.blocks if _reads_all_blocks(variant) else _cell_blocks(variant.form)
    summed = variant.gates.float32 or variant.gates.window > 1
    step = blocks * shape.units * (4 if summed else 2) + 16
    return round_up(shape.team_bytes + 4 * 8 * TILE * variant.gates.window + stages * (2 * TILE * step + 32), ALIGNED)


def _reads_all_blocks(variant: ScanVariant) -> bool:
    """Return whether tiles include the blocks that only hidden values need."""
    return variant.all_steps or variant.gates.window > 1


def _cell_blocks(form: ScanForm) -> int:
    """Return the number of blocks that the cell needs."""
    return 3 if form.blocks == 4 and not form.sru else 2
