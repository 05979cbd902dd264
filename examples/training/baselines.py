"""Simple models as baselines, from the counts of words or bytes in the training part alone. Requires the standard library only."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from training.step_sets import TaggedWords
from training.step_tasks import BOUNDARY, TASKS

COUNT = 0.01
"""Added to the count of every byte after every byte."""


def frequent_labels(train: list[TaggedWords], test: list[TaggedWords]) -> list[list[str]]:
    """Return the label that each word has most often in the training part, and for other words the most frequent label."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for example in train:
        for word, label in zip(example.words, example.labels, strict=True):
            counts[word][label] += 1
    [(most, _)] = sum(counts.values(), Counter()).most_common(1)
    best = {word: labels.most_common(1)[0][0] for word, labels in counts.items()}
    return [[best.get(word, most) for word in example.words] for example in test]


def bigrams(train: list[str], test: list[str]) -> list[list[float]]:
    """Return the logarithm of the probability of each byte after the byte before it, as often as in the training part."""
    counts: Counter[tuple[int, int]] = Counter()
    for line in train:
        counts.update(pairwise(_bytes(line)))
    totals: Counter[int] = Counter()
    for (before, _), count in counts.items():
        totals[before] += count
    return [
        [math.log((counts[pair] + COUNT) / (totals[pair[0]] + 256 * COUNT)) for pair in pairwise(_bytes(line))] for line in test
    ]


def _bytes(line: str) -> list[int]:
    return [BOUNDARY, *line.encode(), BOUNDARY]


BASELINES: dict[str, tuple[str, Callable[[list[Any], list[Any]], list[Any]]]] = {
    "tags": ("most frequent label of each word", frequent_labels),
    "text": ("pairs of bytes", bigrams),
}
"""A name, and a function from the training and the test part to answers, by the kind of set."""


def baseline(kind: str, train: list[Any], test: list[Any]) -> dict[str, dict[str, float]]:
    """Return the figures of quality by the name of the baseline, none for a kind without one."""
    if kind not in BASELINES:
        return {}
    name, answers = BASELINES[kind]
    return {name: TASKS[kind].quality(test, answers(train, test))}
