"""The tokenizers of the recipes for text."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

UNKNOWN_WORD, UNKNOWN = "[UNK]", 0


def text_tokenizer(texts: list[str], minimum_count: int) -> Tokenizer:
    """Return a tokenizer of lower-case words and single punctuation marks, with digits replaced by 0.

    In both tokenizers, the vocabulary has the words that occur at least `minimum_count` times, and the unknown token has id 0.
    """
    normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex("[0-9]"), "0")])
    return _trained(normalizer, pre_tokenizers.BertPreTokenizer(), texts, minimum_count)


def word_tokenizer(texts: list[str], minimum_count: int) -> Tokenizer:
    """Return a tokenizer of lower-case words with spaces between them, one token for each word."""
    return _trained(normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit(), texts, minimum_count)


def _trained(normalizer: Any, pre_tokenizer: Any, texts: list[str], minimum_count: int) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({UNKNOWN_WORD: UNKNOWN}, UNKNOWN_WORD))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.WordLevelTrainer(min_frequency=minimum_count, special_tokens=[UNKNOWN_WORD], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_ids(tokenizer: Tokenizer, text: str) -> Tensor:
    """Return the tokens of a text. A text without tokens becomes one unknown token."""
    return torch.tensor(tokenizer.encode(text).ids or [UNKNOWN])
