"""Prepares questions for training: the holdout split, the tokenizer and batches."""

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
class TokenisedQuestion:
    """A question as token ids."""

    label: int
    tokens: Tensor


@dataclass(frozen=True)
class PaddedBatch:
    """Padded rows. tokens: (rows, longest); the padding is arbitrary."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor


def hold_out(questions: list[Question], fold: int) -> tuple[list[Question], list[Question]]:
    """Return nine tenths for training and tenth number `fold` for evaluation. The split is the same for every training seed."""
    shuffled = list(questions)
    random.Random(SPLIT_SEED).shuffle(shuffled)
    tenth = len(questions) // TENTHS
    begin, end = fold * tenth, (fold + 1) * tenth
    return shuffled[:begin] + shuffled[end:], shuffled[begin:end]


def make_tokenizer(questions: Iterable[Question], minimum_count: int) -> Tokenizer:
    """Return a tokenizer of lower-case words and single punctuation marks, with digits replaced by 0. The unknown token has id 0."""
    tokenizer = Tokenizer(models.WordLevel({UNKNOWN_WORD: UNKNOWN}, UNKNOWN_WORD))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex("[0-9]"), "0")])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(min_frequency=minimum_count, special_tokens=[UNKNOWN_WORD], show_progress=False)
    tokenizer.train_from_iterator((question.text for question in questions), trainer)
    return tokenizer


def tokenised(questions: Iterable[Question], tokenizer: Tokenizer) -> list[TokenisedQuestion]:
    return [TokenisedQuestion(question.label, torch.tensor(tokenizer.encode(question.text).ids)) for question in questions]


def batches(rows: list[TokenisedQuestion], size: int) -> Iterator[PaddedBatch]:
    for start in range(0, len(rows), size):
        batch_rows = rows[start : start + size]
        tokens = pad_sequence([row.tokens for row in batch_rows], batch_first=True)
        yield PaddedBatch(
            tokens, torch.tensor([len(row.tokens) for row in batch_rows]), torch.tensor([row.label for row in batch_rows])
        )


def shuffled_batches(rows: list[TokenisedQuestion], size: int, shuffler: random.Random) -> list[PaddedBatch]:
    """Return batches with every row once, in random order. Rows of similar length share a batch, which keeps padding small."""
    shuffled = shuffler.sample(rows, len(rows))
    groups = (shuffled[start : start + 8 * size] for start in range(0, len(rows), 8 * size))
    batch_list = [batch for group in groups for batch in batches(sorted(group, key=lambda row: len(row.tokens)), size)]
    shuffler.shuffle(batch_list)
    return batch_list
