"""A tokenizer of words with spaces between them: one token for each word."""

from __future__ import annotations

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from training.vocabulary import UNKNOWN, UNKNOWN_WORD


def word_tokenizer(texts: list[str], minimum_count: int) -> Tokenizer:
    """Return a tokenizer of lower-case words that occur at least `minimum_count` times. The unknown token has id 0."""
    tokenizer = Tokenizer(models.WordLevel({UNKNOWN_WORD: UNKNOWN}, UNKNOWN_WORD))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(min_frequency=minimum_count, special_tokens=[UNKNOWN_WORD], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
