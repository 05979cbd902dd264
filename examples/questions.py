"""Questions to train on: holding out a tenth, words to numbers, batches."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trec import Question

UNKNOWN_WORD, UNKNOWN = "[UNK]", 0
SPLIT_SEED, TENTHS = 0, 10


@dataclass(frozen=True)
class Row:
    """A question in numbers."""

    label: int
    tokens: Tensor


@dataclass(frozen=True)
class Batch:
    """Rows side by side: tokens (rows, longest), padded with anything beyond each row's length."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor


def hold_out(questions: list[Question], fold: int) -> tuple[list[Question], list[Question]]:
    """Nine tenths to train on and the tenth number `fold` that judges settings, the same for every seed of a training."""
    shuffled = list(questions)
    random.Random(SPLIT_SEED).shuffle(shuffled)
    tenth = len(questions) // TENTHS
    begin, end = fold * tenth, (fold + 1) * tenth
    return shuffled[:begin] + shuffled[end:], shuffled[begin:end]


def make_tokenizer(questions: Iterable[Question], minimum_count: int) -> Tokenizer:
    """Whole words and single punctuation marks, lower case, every digit a 0; the unknown token is number 0."""
    tokenizer = Tokenizer(models.WordLevel({UNKNOWN_WORD: UNKNOWN}, UNKNOWN_WORD))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex("[0-9]"), "0")])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(min_frequency=minimum_count, special_tokens=[UNKNOWN_WORD], show_progress=False)
    tokenizer.train_from_iterator((question.text for question in questions), trainer)
    return tokenizer


def numbered(questions: Iterable[Question], tokenizer: Tokenizer) -> list[Row]:
    return [Row(question.label, torch.tensor(tokenizer.encode(question.text).ids)) for question in questions]


def batches(rows: list[Row], size: int) -> Iterator[Batch]:
    for start in range(0, len(rows), size):
        chosen = rows[start : start + size]
        tokens = pad_sequence([row.tokens for row in chosen], batch_first=True)
        yield Batch(tokens, torch.tensor([len(row.tokens) for row in chosen]), torch.tensor([row.label for row in chosen]))


def shuffled_batches(rows: list[Row], size: int, shuffler: random.Random) -> list[Batch]:
    """Every row once, in random order; rows of like length come together, so that little is padding."""
    shuffled = shuffler.sample(rows, len(rows))
    stretches = (shuffled[start : start + 8 * size] for start in range(0, len(rows), 8 * size))
    made = [batch for stretch in stretches for batch in batches(sorted(stretch, key=lambda row: len(row.tokens)), size)]
    shuffler.shuffle(made)
    return made
