"""The least work of a workload: the multiplications that its answers need, whatever a backend does.

Padding, the embedding in front of a folded layer, and gates that change no answer are not needed. Additions, activations and the
data are not counted.
"""

from __future__ import annotations

from kernels.bench.weights import family_of
from kernels.bench.workload import DILATIONS, EMBEDDED, FORMS, IDS, LAYERS, STACKS, TEMPORAL_WIDTH, TEXT_CNNS, WANT, Workload

CELL_BLOCKS = 2
"""The candidate and the forget gate, on which the cell of a family with FORMS depends."""


def multiplications(workload: Workload) -> int:
    """Return the multiplications with weights. Each window of a convolution counts fully, also at the ends of a row."""
    if workload.kind == "product":
        return workload.steps * workload.inputs * workload.hidden
    if workload.family == "conv":
        return 0 if _is_folded(workload) else _taps(workload) * workload.inputs * workload.outputs
    if workload.family in FORMS:
        return 0 if _is_folded(workload) else _scan_blocks(workload) * workload.hidden * _window_inputs(workload)
    columns = workload.depth * workload.hidden + sum(_multiplied_inputs(workload))
    return _tokens(workload) * workload.directions * _blocks(workload) * workload.hidden * columns


def _multiplied_inputs(workload: Workload) -> list[int]:
    """Return the columns of each level of an LSTM or GRU that are multiplied with weights. Columns of gate inputs and ids are not."""
    return workload.level_inputs if workload.kind in LAYERS else []


def _blocks(workload: Workload) -> int:
    """Return the blocks of gates of a step."""
    return len(family_of(workload).gates)


def _is_folded(workload: Workload) -> bool:
    return workload.kind in IDS and workload.form != EMBEDDED


def _tokens(workload: Workload) -> int:
    return sum(workload.row_lengths())


def _window_inputs(workload: Workload) -> int:
    """Return the inputs of the gates of a family with FORMS, for all steps of the window."""
    return workload.window * workload.inputs


def _scan_blocks(workload: Workload) -> int:
    """Return the blocks of gates of all steps of a family with FORMS.

    Blocks after CELL_BLOCKS, and the skip in the table of a folded SRU, do not change the cell: only steps with an answer need them.
    """
    late = _blocks(workload) - CELL_BLOCKS + (len(family_of(workload).table_gates) if _is_folded(workload) else 0)
    answers = _tokens(workload) if WANT[workload.kind] == "steps" else workload.rows
    return CELL_BLOCKS * _tokens(workload) + late * answers


def _taps(workload: Workload) -> int:
    """Return the taps of all windows of all layers."""
    return sum(_windows(workload, width) * width for width in workload.widths)


def _windows(workload: Workload, width: int) -> int:
    """Return the number of windows of all layers. In a text CNN only whole windows count."""
    if workload.kind == "tcn-last":
        return sum(map(_windows_for_the_last_step, workload.row_lengths()))
    beyond = width - 1 if workload.kind in TEXT_CNNS else 0
    layers = workload.layers if workload.kind in STACKS else 1
    return layers * sum(max(steps - beyond, 0) for steps in workload.row_lengths())


def _windows_for_the_last_step(steps: int) -> int:
    """Return the windows of all layers that the last step of a row depends on."""
    needed, count = {steps - 1}, 0
    for dilation in reversed(DILATIONS):
        count += len(needed)
        needed = {step - tap * dilation for step in needed for tap in range(TEMPORAL_WIDTH) if step >= tap * dilation}
    return count
