"""A hidden Markov model that generates words with labels, and the best figures that any model can reach on its sequences.

A sequence begins in a random state. In each state it emits a word, which is a letter, and then ends with the probability STOP, or moves
to the next state. The label of a word is its state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from training.step_sets import TaggedWords

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
STATES, WORDS = 6, "abcdefghij"
STOP = 1 / 30
SEED = 4


@dataclass(frozen=True)
class HiddenMarkovModel:
    """start: (states,); moves: (states, states), the next state in a row for each state; emits: (states, words)."""

    start: Array
    moves: Array
    emits: Array

    @classmethod
    def random(cls) -> HiddenMarkovModel:
        """Return the model of SEED: each state prefers few next states and few words, and states share words."""
        generator = np.random.default_rng(SEED)
        moves = generator.dirichlet(np.full(STATES, 0.1), STATES)
        emits = generator.dirichlet(np.full(len(WORDS), 0.5), STATES)
        return cls(np.full(STATES, 1 / STATES), moves, emits)

    def sample(self, generator: np.random.Generator) -> TaggedWords:
        state, words, labels = int(generator.choice(STATES, p=self.start)), [], []
        while True:
            words.append(WORDS[generator.choice(len(WORDS), p=self.emits[state])])
            labels.append(f"s{state}")
            if generator.random() < STOP:
                return TaggedWords(words, labels)
            state = int(generator.choice(STATES, p=self.moves[state]))

    def forward(self, words: list[str]) -> tuple[Array, Array]:
        """Return the probability of each state given the words up to each step, (steps, states), and the probability of each word given
        the words before it, (steps,)."""
        expected, filtered, scales = self.start, [], []
        for word in words:
            joint = expected * self.emits[:, WORDS.index(word)]
            scales.append(joint.sum())
            filtered.append(joint / joint.sum())
            expected = filtered[-1] @ self.moves
        return np.array(filtered), np.array(scales)

    def posterior(self, words: list[str]) -> Array:
        """Return the probability of each state given all words, (steps, states)."""
        filtered, _ = self.forward(words)
        later, smoothed = np.ones(STATES), []
        for step in range(len(words) - 1, -1, -1):
            smoothed.append(filtered[step] * later / (filtered[step] * later).sum())
            later = self.moves @ (self.emits[:, WORDS.index(words[step])] * later)
            later /= later.sum()
        return np.array(smoothed[::-1])

    def best_labels(self, words: list[str]) -> list[str]:
        """Return the most probable label of each word given all words: no tagger has a higher expected accuracy."""
        return [f"s{state}" for state in self.posterior(words).argmax(axis=1)]

    def logarithms(self, words: list[str]) -> list[float]:
        """Return the logarithm of the probability of each word given the words before it, and of the end after the last word: no model
        of the sequences has a lower expected perplexity."""
        goes_on = [0.0] + [math.log(1 - STOP)] * (len(words) - 1)
        return [*(np.log(self.forward(words)[1]) + goes_on).tolist(), math.log(STOP)]
