"""Compares an imported model with the outputs of its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.importers.draft import Draft, ImportRefused, Original
from service.modeling.array_run import FINAL, MAIN, SEQUENCES, STATE, run_arrays
from service.modeling.encoder import Encoder
from service.modeling.npz import Array
from service.modeling.spec.heads import Head
from service.modeling.tokenizer import Tokenizer

SAMPLE_STEPS = (1, 2, 3, 5, 8, 13, 34)
"""Lengths of the sequences for which a model is compared with its source."""
KEPT_BY_RECIPES = {"kind", "labels", "threshold", "top"}
"""Keys of a head that do not change its main output."""


class NotCompared(Exception):
    """A model cannot be compared with its source. The message states the reason."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest and the mean absolute difference of one output, and how many numbers were compared."""

    name: str
    largest: float
    mean: float
    numbers: int


@dataclass(frozen=True, slots=True)
class SourceComparison:
    """Differences from a source of outputs, and the name of this source."""

    differences: Sequence[Difference]
    source: str


def differences(encoder: Encoder, arrays: Mapping[str, Array], tokenizer: Tokenizer | None) -> list[Difference]:
    """Return the differences of the outputs in `arrays`, by name.

    Raises ImportRefused if `arrays` has no outputs, or an output that the model lacks.

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


def compare_with_original(
    encoder: Encoder, draft: Draft, original: Original, recipe_head: Mapping[str, Any]
) -> SourceComparison:
    """Compare a model with its source on random sequences of several lengths; raises NotCompared with the reason if that is not possible.

    recipe_head: the keys of the head in the recipe.
    """
    name = _output_of(draft.answers, encoder.spec.head)
    found = draft.head.table
    changed = sorted(key for key in recipe_head.keys() - KEPT_BY_RECIPES if recipe_head[key] != found.get(key))
    if name is None or changed:
        raise NotCompared(f"the recipe changes the head ({', '.join(changed) or 'kind'})")
    errors: dict[int, Array] = {}
    reason = ""
    for steps in _sample_lengths(encoder, original):
        row = _random_row(encoder, steps)
        try:
            expected = draft.as_answer(original.run(row)).astype(np.float64).ravel()
        except Exception as error:  # a framework raises its own errors for a sequence that it does not take
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            continue
        inputs = {"ids" if encoder.spec.input.features is None else "inputs": row[None]}
        actual = run_arrays(encoder, inputs)[name].astype(np.float64).ravel()
        if actual.shape != expected.shape or not np.isfinite(expected).all():
            raise ImportRefused(
                f"for {steps} steps, the source answers {expected.size} numbers, and the model {actual.size}"
                if actual.shape != expected.shape
                else f"for {steps} random steps, the source answers numbers that are not finite"
            )
        errors[steps] = np.abs(actual - expected)
    if not errors:
        raise NotCompared(f"{original.framework} did not run the source: {reason[:200]}")
    every = np.concatenate(list(errors.values()))
    lengths = ", ".join(map(str, errors))
    return SourceComparison(
        [Difference(name, float(every.max(initial=0.0)), float(every.mean()) if every.size else 0.0, every.size)],
        f"random sequences of {lengths} steps, for which {original.framework} computed the outputs of the source",
    )


def _output_of(source: str, head: Head) -> str | None:
    """Return the output of a model that is the main output of its source, or None. source: the kind of its head."""
    if source == head.kind:
        return head.main_output
    return {
        ("regress", "classify"): "logits",
        ("sequence", "tag"): "logits",
        ("classify", "next"): "probabilities",
        ("regress", "embed"): "embedding",
    }.get((source, head.kind))


def _sample_lengths(encoder: Encoder, original: Original) -> Sequence[int]:
    if original.steps is not None:
        return [original.steps]
    return [steps for steps in SAMPLE_STEPS if encoder.spec.min_steps <= steps <= encoder.spec.input.max_steps]


def _random_row(encoder: Encoder, steps: int) -> Array:
    random = np.random.default_rng(steps)
    features = encoder.spec.input.features
    if features is None:
        return random.integers(0, encoder.spec.input.vocabulary or 1, size=steps)
    return random.normal(size=(steps, features)).astype(np.float32)


def _name(encoder: Encoder, name: str) -> str:
    if name.startswith(FINAL):
        return STATE + name.removeprefix(FINAL)
    return encoder.spec.head.main_output or name if name == MAIN else name


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
