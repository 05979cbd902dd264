"""Train a model that answers questions by a span of a passage, and write it as a model folder with a card.

The data is any set of questions in the format of `training/step_sets.py`; `make_sets.py` makes one. The input of the model is a text: the
question, the word `[sep]` and the passage, in which words of the question end with `*`. It answers with the first and the last word of the
answer, as steps of this input.
"""

from __future__ import annotations

import math
import sys

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from training.batches import Batch, Row
from training.recipe import main
from training.service import Advance, Service, ignore
from training.step_recipe import Settings, StepRecipe, families
from training.step_sets import Question
from training.steps import padding_mask
from training.tokenization import token_ids, word_tokenizer

from service.modeling.spec.heads import Head, SpanHead

SEPARATOR = "[sep]"
"""The word between a question and its passage."""
SAME = "*"
"""The ending of a word of the passage that the question has too."""


class SpansRecipe(StepRecipe):
    """An answer is the first and the last word of the span in the passage."""

    task = kind = "spans"
    default_set = "facts"
    settings = families(epochs=8)
    description = "The span of a passage that answers a question"

    def prepare(self, examples: list[Question], settings: Settings) -> tuple[Head, int, Tokenizer]:
        tokenizer = word_tokenizer([joined(example) for example in examples], settings.minimum_count)
        return SpanHead(kind="span"), 2, tokenizer

    def rows(self, examples: list[Question], head: Head, tokenizer: Tokenizer | None) -> list[Row]:
        assert tokenizer
        return [
            Row(
                token_ids(tokenizer, joined(example)),
                torch.tensor([example.start, example.end]) + passage_start(example),
            )
            for example in examples
        ]

    def loss(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross entropy of the first and the last word over the steps of each row. scores: (rows, steps, 2)."""
        padding = padding_mask(batch.lengths, scores.shape[1])[:, :, None]
        return nn.functional.cross_entropy(scores.masked_fill(padding, -math.inf), batch.targets)

    def answer(self, scores: Tensor, example: Question, head: Head) -> tuple[int, int]:
        """Return the span with the highest product of both probabilities whose end is not before its start."""
        both = scores[:, 0, None] + scores[None, :, 1]
        best = int(both.masked_fill(torch.ones_like(both).tril(-1).bool(), -math.inf).argmax())
        start, end = divmod(best, len(scores))
        return start - passage_start(example), end - passage_start(example)

    def ask(self, service: Service, model: str, examples: list[Question], advance: Advance = ignore) -> list[tuple[int, int]]:
        outputs = service.outputs(model, [joined(example) for example in examples], advance)
        starts = map(passage_start, examples)
        return [(output["start"] - start, output["end"] - start) for output, start in zip(outputs, starts, strict=True)]

    def quality(self, examples: list[Question], answers: list[tuple[int, int]]) -> dict[str, float]:
        """Return percentages: of exact spans, and the mean F1 of the words of the span."""
        exact = [(example.start, example.end) == answer for example, answer in zip(examples, answers, strict=True)]
        overlaps = [overlap((each.start, each.end), answer) for each, answer in zip(examples, answers, strict=True)]
        return {"exact_percent": 100 * sum(exact) / len(exact), "f1_percent": 100 * sum(overlaps) / len(overlaps)}


def joined(example: Question) -> str:
    """Return the input of the model: the question, a separator, and the passage with marks at the words of the question."""
    asked = set(example.question.lower().split())
    passage = (f"{word}{SAME}" if word.lower() in asked else word for word in example.passage.split())
    return f"{example.question} {SEPARATOR} {' '.join(passage)}"


def passage_start(example: Question) -> int:
    """Return the step of the first word of the passage."""
    return len(example.question.split()) + 1


def overlap(span: tuple[int, int], answer: tuple[int, int]) -> float:
    """Return the F1 of the words of two spans."""
    shared = max(0, min(span[1], answer[1]) - max(span[0], answer[0]) + 1)
    return 2 * shared / (span[1] - span[0] + answer[1] - answer[0] + 2)


if __name__ == "__main__":
    sys.exit(main(SpansRecipe(), __doc__))
