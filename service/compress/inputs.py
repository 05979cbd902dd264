"""The inputs on which two versions of a model are compared: labelled texts of a file, or random sequences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from service.errors import InvalidInput, ModelError
from service.modeling.spec import ClassifyHead, ModelSpec
from service.modeling.spec.files import read_file
from service.modeling.tokenizer import Tokenizer

RANDOM_SEQUENCES, RANDOM_STEPS, SEED = 256, 64, 0
"""Number of random sequences, their largest length unless the model needs more steps, and their seed."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Sequences as an encoder takes them, where they come from, and for texts the number of the label of each."""

    origin: str
    sequences: list[Tensor]
    labels: list[int] | None = None


def random_inputs(model: ModelSpec) -> Inputs:
    """Return random token ids, or normal values of features, the same in every call."""
    generator = torch.Generator().manual_seed(SEED)
    longest = min(max(model.min_steps, RANDOM_STEPS), model.input.max_steps)
    lengths = torch.randint(model.min_steps, longest + 1, (RANDOM_SEQUENCES,), generator=generator).tolist()
    if model.input.features is not None:
        kind, data = "values", torch.randn(sum(lengths), model.input.features, generator=generator)
    else:
        kind = "token ids"
        data = torch.randint(model.input.vocabulary or 1, (sum(lengths),), generator=generator, dtype=torch.int32)
    origin = f"{RANDOM_SEQUENCES} sequences of random {kind} (seed {SEED}), which say less than real inputs"
    return Inputs(origin, list(torch.split(data, lengths)))


def read_labelled_texts(file: Path, model: ModelSpec, tokenizer: Tokenizer | None) -> Inputs:
    """Return the texts of a file with lines `LABEL text`; raises ModelError for a line that does not fit the model.

    LABEL is a label of the model, a label with a colon and more after it, or the number of a label, from 0.
    """
    if tokenizer is None or not isinstance(model.head, ClassifyHead):
        raise ModelError(f"--data needs a model that classifies texts, and {model.name} does not: leave --data out")
    sequences, labels = [], []
    for number, line in enumerate(_read_lines(file), start=1):
        if line.strip():
            label, _, text = line.strip().partition(" ")
            where = f"{file} line {number}"
            labels.append(_label_number(label, model.head.labels, where))
            sequences.append(_tokenise(text.strip(), model, tokenizer, where))
    if not sequences:
        raise ModelError(f"{file} has no lines: give a file with lines of a label, a space and a text")
    count = "1 text" if len(sequences) == 1 else f"{len(sequences)} texts"
    return Inputs(f"{count} of {file.name}", sequences, labels)


def _read_lines(file: Path) -> list[str]:
    """Return the lines of a file in UTF-8, or in Latin-1 if it is not UTF-8; raises ModelError if it cannot be read."""
    try:
        data = read_file(file)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.split("\n")


def _label_number(label: str, labels: tuple[str, ...], where: str) -> int:
    for name in (label, label.partition(":")[0]):
        if name in labels:
            return labels.index(name)
    if label.isascii() and label.isdigit() and int(label) < len(labels):
        return int(label)
    raise ModelError(f"{where}: {label!r} is no label of the model: the labels are {', '.join(labels)}")


def _tokenise(text: str, model: ModelSpec, tokenizer: Tokenizer, where: str) -> Tensor:
    try:
        ids = np.frombuffer(tokenizer.packed_ids(text, where), dtype="<i4")
    except InvalidInput as error:
        raise ModelError(error.message) from error
    if not model.min_steps <= len(ids) <= model.input.max_steps:
        raise ModelError(
            f"{where} has {len(ids)} tokens and {model.name} takes {model.min_steps} to {model.input.max_steps}: change the line"
        )
    return torch.from_numpy(ids.astype(np.int32))
