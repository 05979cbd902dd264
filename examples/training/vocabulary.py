"""Turns texts into batches of token ids: the tokenizer, pretrained vectors, and padded batches."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from training.text_sets import Example

UNKNOWN_WORD, UNKNOWN = "[UNK]", 0
GROUP = 8
"""Batches whose rows are sorted by length together."""


@dataclass(frozen=True)
class TokenisedText:
    """A text as token ids, with the index of its label."""

    label: int
    tokens: Tensor


@dataclass(frozen=True)
class PaddedBatch:
    """Padded rows. tokens: (rows, longest); the padding is arbitrary."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> PaddedBatch:
        return PaddedBatch(self.tokens.to(device), self.lengths.to(device), self.labels.to(device))


def make_tokenizer(texts: list[str], minimum_count: int, known: Collection[str] = ()) -> Tokenizer:
    """Return a tokenizer of lower-case words and single punctuation marks, with digits replaced by 0. The unknown token has id 0.

    The vocabulary has the words that occur at least `minimum_count` times, and the words of the texts that are in `known`.
    """
    tokenizer = Tokenizer(models.WordLevel({UNKNOWN_WORD: UNKNOWN}, UNKNOWN_WORD))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex("[0-9]"), "0")])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(min_frequency=minimum_count, special_tokens=[UNKNOWN_WORD], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if known:
        rare = sorted(words(texts) & set(known) - tokenizer.get_vocab().keys())
        ids = {word: tokenizer.get_vocab_size() + index for index, word in enumerate(rare)}
        tokenizer.model = models.WordLevel(tokenizer.get_vocab() | ids, UNKNOWN_WORD)
    return tokenizer


def words(texts: list[str]) -> set[str]:
    """Return every word of the texts, as the tokenizer divides them."""
    return make_tokenizer(texts, 1).get_vocab().keys() - {UNKNOWN_WORD}


def read_vectors(file: Path, wanted: Collection[str]) -> dict[str, Tensor]:
    """Return the vectors of the wanted words in a file in the text format of word2vec or GloVe.

    A line is `word number number ...`. A first line with two counts is skipped. Raises ValueError if they differ in width.
    """
    vectors: dict[str, Tensor] = {}
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines):
            word, *values = line.rstrip().split(" ")
            if word in wanted and not (number == 0 and len(values) == 1):
                vectors[word] = torch.tensor([float(value) for value in values])
    if len(widths := {len(vector) for vector in vectors.values()}) > 1:
        raise ValueError(f"{file} has vectors of the widths {sorted(widths)}: all of them need one width")
    return vectors


def tokenised(examples: list[Example], tokenizer: Tokenizer, labels: tuple[str, ...]) -> list[TokenisedText]:
    """Return the examples as token ids. A text without tokens becomes one unknown token; a label that is not in `labels` becomes -1."""
    indices = {label: index for index, label in enumerate(labels)}
    ids = (tokenizer.encode(example.text).ids or [UNKNOWN] for example in examples)
    return [
        TokenisedText(indices.get(example.label, -1), torch.tensor(row)) for example, row in zip(examples, ids, strict=True)
    ]


def batches(rows: list[TokenisedText], size: int) -> Iterator[PaddedBatch]:
    for start in range(0, len(rows), size):
        batch_rows = rows[start : start + size]
        tokens = pad_sequence([row.tokens for row in batch_rows], batch_first=True)
        yield PaddedBatch(
            tokens, torch.tensor([len(row.tokens) for row in batch_rows]), torch.tensor([row.label for row in batch_rows])
        )


def shuffled_batches(rows: list[TokenisedText], size: int, shuffler: random.Random) -> list[PaddedBatch]:
    """Return batches with every row once, in random order. Rows of similar length share a batch, which keeps padding small."""
    shuffled = shuffler.sample(rows, len(rows))
    groups = (shuffled[start : start + GROUP * size] for start in range(0, len(rows), GROUP * size))
    batch_list = [batch for group in groups for batch in batches(sorted(group, key=lambda row: len(row.tokens)), size)]
    shuffler.shuffle(batch_list)
    return batch_list
