"""Train a tagger, which answers with a label for each word of a text, and write it as a model folder with a card.

The data is any set of words with labels in the format of `training/step_sets.py`; `make_sets.py` makes two. The input of the model is
words with spaces between them.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer
from torch import Tensor
from training.batches import NO_TARGET, Row
from training.recipe import main
from training.service import Advance, Service, ignore
from training.step_recipe import Settings, StepRecipe
from training.step_sets import TaggedWords
from training.tokenization import token_ids, word_tokenizer

from service.modeling.spec.heads import Head, TagHead


class TagsRecipe(StepRecipe):
    """An answer is a list of labels."""

    task = kind = "tags"
    default_set = "facts"
    description = "A label for every word"

    def prepare(self, examples: list[TaggedWords], settings: Settings) -> tuple[Head, int, Tokenizer]:
        labels = sorted({label for example in examples for label in example.labels})
        tokenizer = word_tokenizer([" ".join(example.words) for example in examples], settings.minimum_count)
        return TagHead(kind="tag", labels=tuple(labels)), len(labels), tokenizer

    def rows(self, examples: list[TaggedWords], head: Head, tokenizer: Tokenizer | None) -> list[Row]:
        """Return the rows. A label that the training part lacks is no target."""
        assert isinstance(head, TagHead) and tokenizer
        index = {label: number for number, label in enumerate(head.labels)}
        return [
            Row(
                token_ids(tokenizer, " ".join(example.words)),
                torch.tensor([index.get(label, NO_TARGET) for label in example.labels]),
            )
            for example in examples
        ]

    def answer(self, scores: Tensor, example: TaggedWords, head: Head) -> list[str]:
        assert isinstance(head, TagHead)
        return [head.labels[index] for index in scores.argmax(1).tolist()]

    def ask(self, service: Service, model: str, examples: list[TaggedWords], advance: Advance = ignore) -> list[list[str]]:
        inputs = [" ".join(example.words) for example in examples]
        return [output["labels"] for output in service.outputs(model, inputs, advance)]

    def quality(self, examples: list[TaggedWords], answers: list[list[str]]) -> dict[str, float]:
        """Return percentages: of correct labels, and the mean over the labels of their F1."""
        pairs = [pair for each, labels in zip(examples, answers, strict=True) for pair in zip(each.labels, labels, strict=True)]
        accuracy = 100 * sum(label == answer for label, answer in pairs) / len(pairs)
        scores = [f1(pairs, label) for label in sorted({label for label, _ in pairs})]
        return {"accuracy_percent": accuracy, "f1_percent": 100 * sum(scores) / len(scores)}


def f1(pairs: list[tuple[str, str]], label: str) -> float:
    """Return the F1 of a label, of pairs of right label and answer."""
    right = sum(pair == (label, label) for pair in pairs)
    return 2 * right / sum((pair[0] == label) + (pair[1] == label) for pair in pairs)


if __name__ == "__main__":
    sys.exit(main(TagsRecipe(), __doc__))
