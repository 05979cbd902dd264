"""Defines the draft of a model: the input, layers and head that an importer found in a foreign checkpoint, as in model.toml."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import ModelError, SettingsError

Array = NDArray[Any]
UNFIT = (ArithmeticError, LookupError, TypeError, ValueError)
"""What numpy raises for arrays whose shapes make no layer."""
ZIP_ERRORS = (OSError, EOFError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""Exceptions of zipfile for damaged archives."""
DEFAULT_STEPS = 512
"""`input.max_steps` of a model where neither the checkpoint nor the recipe sets it."""
POOLING = ("pool", "attention_width", "dense")
"""Keys of a head that remain when a recipe names another kind of head."""


class ImportRefused(ModelError):
    """The checkpoint cannot become a model folder. The message names the part that is in the way, and a remedy."""


class ImportQuestion(ImportRefused, SettingsError):
    """Several models fit the checkpoint. The message names them, and the flag that chooses."""


@contextmanager
def refusing(errors: tuple[type[Exception], ...], defect: str, remedy: str) -> Iterator[None]:
    """Raise ImportRefused with the defect, the exception and the remedy for these exceptions of the block."""
    try:
        yield
    except errors as error:
        raise ImportRefused(f"{defect} ({error}): {remedy}") from error


@contextmanager
def named_in_refusals(name: object) -> Iterator[None]:
    """Begin the message of an ImportRefused of the block with a name."""
    try:
        yield
    except ImportRefused as refused:
        raise ImportRefused(f"{name}: {refused}") from refused


@dataclass(slots=True)
class Part:
    """One layer, or the head: its table of model.toml and its tensors, named within the table (`0.forward.input`, `weight`)."""

    table: dict[str, Any]
    arrays: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Original:
    """The source itself, run by its framework.

    framework: its name and version; run: returns the first output for one sequence, (steps,) ids or (steps, features), and raises an
    exception for a sequence that it does not take; steps: the only length that it takes, or None.
    """

    framework: str
    run: Callable[[Array], Array]
    steps: int | None = None


@dataclass(slots=True)
class Draft:
    """A model as model.toml describes it, with weights in float32.

    input, layers, head: as in model.toml, with the sizes that follow from the arrays. The head may be incomplete: a recipe completes it.
    used: source tensor -> its place in the model; unused: source tensors that no layer needed; notes: differences between the source and
    this model that its user must know; assumed: settings that the source lacks, as they were tried, with others that fit (those of the
    head begin with "head"); tried: a recipe that says it; original: computes the outputs of the source, where it can be run; as_answer:
    turns its output for a sequence into the main output of this model; answers: the kind of head with this main output.
    """

    source: str
    input: dict[str, Any]
    layers: list[Part]
    head: Part
    used: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    tried: str = ""
    original: Original | None = None
    as_answer: Callable[[Array], Array] = np.asarray
    answers: str = ""

    def refusal(self, reason: str, assumed: Sequence[str] = ()) -> ImportRefused:
        """Return the refusal of this model, which is a question where something was assumed. assumed: a part of it; empty for all."""
        texts = [f"- {text}" for text in assumed or self.assumed]
        if not texts:
            return ImportRefused(reason)
        answers = "Prove it with --check FILE.npz, outputs of the source, or say it with --recipe FILE"
        recipe = f", such as this recipe, corrected:\n{self.tried}" if self.tried else ""
        return ImportQuestion("\n".join([f"{reason}. This was assumed:", *texts, answers + recipe]))

    def arrays(self) -> dict[str, Array]:
        """Return every tensor under its name in weights.safetensors, in float32."""
        parts: list[tuple[str, Part]] = [(f"layers.{index}", part) for index, part in enumerate(self.layers)]
        return {
            f"{prefix}.{name}": np.ascontiguousarray(array, np.float32)
            for prefix, part in [*parts, ("head", self.head)]
            for name, array in part.arrays.items()
        }

    def _head_of(self, kind: str | None) -> dict[str, Any]:
        """Return the table of the head for a recipe that names this kind of head, or none."""
        if kind is None or kind == self.head.table.get("kind"):
            return self.head.table
        return {key: value for key, value in self.head.table.items() if key in POOLING}

    def model(self, name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of model.toml. overrides: keys of the tables `input` and `head`, and of the top level, from a recipe."""
        head = {**self._head_of(overrides.get("head", {}).get("kind")), **overrides.get("head", {})}
        top = {key: value for key, value in overrides.items() if key not in ("input", "head", "layers")}
        return {
            "name": name,
            "precision": "float32",
            **top,
            "input": {"max_steps": DEFAULT_STEPS, **self.input, **overrides.get("input", {})},
            "layers": [part.table for part in self.layers],
            "head": head,
        }
