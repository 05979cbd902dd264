"""Compares the answers of two versions of a model on the same inputs: labelled texts of a file, or random sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.ragged import Ragged
from service.errors import InvalidInput, ModelError
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec
from service.modeling.spec.files import read_file
from service.modeling.spec.heads import ClassifyHead
from service.modeling.tokenizer import Tokenizer

RANDOM_SEQUENCES, RANDOM_STEPS, SEED = 256, 64, 0
"""Number of random sequences, their largest length unless the model needs more steps, and their seed."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Sequences as an encoder takes them, where they come from, and for texts the number of the label of each."""

    origin: str
    sequences: list[Tensor]
    labels: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two versions differ.

    largest, mean: differences of the outputs; same_best: the share of inputs with the same best answer, or None for a head that chooses
    nothing; accuracies: of both versions, empty without labels.
    """

    largest: float
    mean: float
    same_best: float | None
    accuracies: list[float]


def random_inputs(model: ModelSpec) -> Inputs:
    """Return random token ids, or normal values of features, the same in every call."""
    generator = torch.Generator().manual_seed(SEED)
    longest = min(max(model.min_steps, RANDOM_STEPS), model.input.max_steps)
    lengths = torch.randint(model.min_steps, longest + 1, (RANDOM_SEQUENCES,), generator=generator).tolist()
    if model.input.features is None:
        data = torch.randint(model.input.vocabulary or 1, (sum(lengths),), generator=generator, dtype=torch.int32)
    else:
        data = torch.randn(sum(lengths), model.input.features, generator=generator)
    kind = "token ids" if model.input.features is None else "values"
    origin = f"{RANDOM_SEQUENCES} sequences of random {kind} (seed {SEED}), which say less than real inputs"
    return Inputs(origin, list(torch.split(data, lengths)))


def read_labelled_texts(file: Path, model: ModelSpec, tokenizer: Tokenizer | None) -> Inputs:
    """Return the texts of a file in UTF-8 or Latin-1 with lines `LABEL text`; raises ModelError for a line that does not fit the model.

    LABEL is a label of the model, a label with a colon and more after it, or the number of a label, from 0.
    """
    if tokenizer is None or not isinstance(model.head, ClassifyHead):
        raise ModelError(f"--data needs a model that classifies texts, and {model.name} does not: leave --data out")
    try:
        data = read_file(file)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    try:
        content = data.decode()
    except UnicodeDecodeError:
        content = data.decode("latin-1")
    sequences, labels = [], []
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            label, _, text = line.strip().partition(" ")
            where = f"{file} line {number}"
            labels.append(_label_number(label, model.head.labels, where))
            sequences.append(_tokenise(text.strip(), model, tokenizer, where))
    if not sequences:
        raise ModelError(f"{file} has no lines: give a file with lines of a label, a space and a text")
    count = "1 text" if len(sequences) == 1 else f"{len(sequences)} texts"
    return Inputs(f"{count} of {file.name}", sequences, labels)


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


def compare(encoders: Sequence[Encoder], inputs: Inputs) -> Comparison:
    """Return how the answers of two versions of a model differ."""
    (first, chosen), (second, chosen_then) = (_answers(encoder, inputs.sequences) for encoder in encoders)
    differences = (first - second).abs()
    same = sum(map(list.__eq__, chosen, chosen_then)) / len(inputs.sequences) if chosen else None
    labels = [[label] for label in inputs.labels or ()]
    accuracies = [sum(map(list.__eq__, best, labels)) / len(labels) for best in (chosen, chosen_then) if labels]
    return Comparison(differences.max().item(), differences.double().mean().item(), same, accuracies)


def _answers(encoder: Encoder, sequences: Sequence[Tensor]) -> tuple[Tensor, list[list[int]]]:
    """Return all numbers of the answers, and for each input the labels, positions or token that the head chooses, if it does."""
    spec = encoder.spec
    is_classifier = any(field.best for field in spec.answer_fields)
    values: list[Tensor] = []
    chosen: list[list[int]] = []
    for sequence in sequences:
        x = Ragged(sequence, torch.tensor([0, len(sequence)], dtype=torch.int32))
        encoding = encoder(x, sequence=spec.head.answer_vector == "sequence")
        output = encoding.head_output
        values.append(next(part for part in (encoding.sequence, output.scores, output.embedding) if part is not None).flatten())
        best = output.scores.argmax(dim=1) if is_classifier and output.scores is not None else output.picks
        if best is not None:
            is_ranked = spec.head.kind == "next"  # only its first token is chosen
            chosen.append((best[:, 0] if is_ranked else best).flatten().tolist())
    return torch.cat(values), chosen
