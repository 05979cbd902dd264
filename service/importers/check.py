"""Compares an imported model with outputs of its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from service.importers.draft import ImportRefused
from service.modeling.array_run import FINAL, MAIN, SEQUENCES, STATE, run_arrays
from service.modeling.encoder import Encoder
from service.modeling.npz import Array
from service.modeling.tokenizer import Tokenizer

MAIN_OUTPUTS = {
    "classify": "scores",
    "regress": "value",
    "tag": "probabilities",
    "next": "probabilities",
    "embed": "embedding",
    "sequence": "sequence",
}
"""What `output` means for a head."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest and the mean absolute difference of one output, and how many numbers were compared."""

    name: str
    largest: float
    mean: float
    numbers: int


def differences(encoder: Encoder, arrays: Mapping[str, Array], tokenizer: Tokenizer | None) -> list[Difference]:
    """Return the differences of the outputs in `arrays`, by name; raises ImportRefused if it has none, or one that the model lacks.

    arrays: inputs as for `run_arrays`, and expected outputs under the names of its result. `output` stands for the main output of the head,
    and `final.` before the name of a state for the state after the sequences. Padded steps are not compared.
    """
    outputs = run_arrays(encoder, arrays, tokenizer)
    expected = {
        _name(encoder, name): array for name, array in arrays.items() if name not in SEQUENCES and not name.startswith(STATE)
    }
    if not expected:
        raise ImportRefused(f"the file has no expected outputs: add any of {', '.join(outputs)}")
    return [_difference(name, outputs, array, arrays) for name, array in expected.items()]


def _name(encoder: Encoder, name: str) -> str:
    if name.startswith(FINAL):
        return STATE + name.removeprefix(FINAL)
    return MAIN_OUTPUTS.get(encoder.spec.head.kind, name) if name == MAIN else name


def _difference(name: str, outputs: Mapping[str, Array], expected: Array, arrays: Mapping[str, Array]) -> Difference:
    if name not in outputs:
        raise ImportRefused(f"the file has the output {name!r}, which the model lacks: its outputs are {', '.join(outputs)}")
    actual, wanted = outputs[name].astype(np.float64), expected.astype(np.float64)
    if actual.shape != wanted.shape:
        raise ImportRefused(
            f"the output {name!r} has the shape {wanted.shape} in the file, and the model computes {actual.shape}"
        )
    if not np.isfinite(wanted).all():
        raise ImportRefused(f"the output {name!r} has values in the file that are not finite")
    error = np.abs(actual - wanted)
    if "lengths" in arrays and name in ("sequence", "probabilities") and error.ndim > 2:
        lengths = np.diff(outputs["offsets"]) if "offsets" in outputs else arrays["lengths"]
        error = error[np.arange(error.shape[1]) < lengths[:, None]]
    return Difference(name, float(error.max(initial=0.0)), float(error.mean()) if error.size else 0.0, error.size)
