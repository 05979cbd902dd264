"""Imports archives of torch that have a program: .pt2 files of torch.export.save, and TorchScript files of torch.jit.save.

`exported` and `script` read the programs: torch itself would run code of the file to read them. `translation` carries out their calls on
the signals of `service.importers.chain`. `tensors` carries them out on sample sequences, with torch itself, for the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from onnx import TensorProto

from service.importers.chain.finishing import finished
from service.importers.chain.reading import Reading
from service.importers.chain.signal import Signal
from service.importers.draft import Array, Draft, ImportRefused, Original
from service.importers.onnx.budget import Budget
from service.importers.onnx.graph import MALFORMED
from service.importers.onnx.readings import GraphInput, InputPlan, Start, first_draft, plans
from service.importers.torch_archive.archive import Archive
from service.importers.torch_archive.exported import MODEL, ExportedProgram
from service.importers.torch_archive.operators import OPERATORS
from service.importers.torch_archive.program import Program
from service.importers.torch_archive.script import ScriptProgram
from service.importers.torch_archive.tensors import PURE, TensorMachine
from service.importers.torch_archive.translation import TranslatingMachine

OPSET = 20
"""Of the operators of ONNX through which operators of torch are translated."""
MOST_SIZES = 32
"""How many numbers of features are tried for a program that does not define it."""


def read(path: Path) -> Draft:
    """Return the model in an archive; raises ImportRefused if model.toml cannot express it."""
    try:
        return _read(path)
    except (*MALFORMED, RuntimeError) as error:
        raise ImportRefused(f"{path} is damaged ({type(error).__name__}: {error}): save it again") from error


def _read(path: Path) -> Draft:
    archive = Archive(path)
    program: Program = ExportedProgram(archive) if MODEL in archive else ScriptProgram(archive)
    numbers = sum(tensor.numel() for tensor in program.weights.values())
    budget = Budget(numbers, "program")

    def translate(start: Start) -> Draft:
        output = program.run(TranslatingMachine(start.reading, budget), start.values)
        if not isinstance(output, Signal):
            raise ImportRefused("the output does not depend on the sequence")
        return finished(output, "program of torch.export" if MODEL in archive else "TorchScript program")

    found = first_draft(path, (plan.start(OPSET) for plan in _plans(program)), translate)
    if found is None:
        raise ImportRefused(f"{path}: no input is a sequence of token ids or features")
    draft, (plan, reading, _) = found
    _complete(draft, program, plan, reading, numbers)
    return draft


def _plans(program: Program) -> Iterator[InputPlan]:
    """Return each way to read the inputs. Where an archive does not have their shapes, usual shapes are tried."""
    if not program.inputs:
        raise ImportRefused("the program has no inputs")
    if all(one.shape is not None for one in program.inputs):
        yield from plans([_graph_input(one.name, bool(one.has_ids), one.shape or ()) for one in program.inputs])
        return
    first, *others = (one.name for one in program.inputs)
    for others_read in _other_inputs(others):
        for shape in _shapes(program):
            yield from plans([_graph_input(first, len(shape) == 2, shape), *others_read])


def _other_inputs(names: Sequence[str]) -> list[list[GraphInput]]:
    """Return the possible inputs after the first: lengths and initial states, or initial states alone."""
    states = [_graph_input(name, False, (None, None, None)) for name in names]
    return [[_graph_input(names[0], True, (None,)), *states[1:]], states] if names else [[]]


def _shapes(program: Program) -> list[tuple[int | None, ...]]:
    """Return the shapes that a sequence may have: token ids, or as many features as an axis of the weights has entries."""
    sizes = dict.fromkeys(size for tensor in program.weights.values() for size in tensor.shape[1:])
    features = [*sizes][:MOST_SIZES]
    return [(None, None), *((None, None, size) for size in features), *((None, size, None) for size in features)]


def _graph_input(name: str, has_ids: bool, shape: Sequence[int | None]) -> GraphInput:
    return GraphInput(name, TensorProto.INT64 if has_ids else TensorProto.FLOAT, tuple(shape), ("",) * len(shape))


def _complete(draft: Draft, program: Program, plan: InputPlan, reading: Reading, numbers: int) -> None:
    """Add the results of the translation: notes, unused tensors and the source itself."""
    reading.complete(draft, program.weights, "program")
    operators = frozenset((*PURE, *OPERATORS, *(f"{name}_" for name in OPERATORS)))

    def run(row: Array) -> Array:
        inputs = plan.sample(row)
        if isinstance(program, ScriptProgram):
            program.steps = 0
        machine = TensorMachine(operators, Budget(numbers, "program"))
        result = program.run(machine, {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()})
        answer: Array = result.float().numpy()
        return answer

    draft.original = Original(f"torch {torch.__version__}", run, reading.steps if reading.fixed else None)
