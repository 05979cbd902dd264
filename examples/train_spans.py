"""Train a model that answers questions by a span of a passage, of any of six families, and write it as a model folder with a card.

The data is any set of questions in the format of `training/step_sets.py`; `make_sets.py` makes one. The input of the model is a text: the
question, the word `[sep]` and the passage, in which words of the question end with `*`. It answers with the first and the last word of the
answer, as steps of this input.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from training.step_fitting import Row, Settings, StepBatch
from training.step_recipe import Prepared, Recipe, defaults, main
from training.step_sets import Question
from training.step_tasks import Spans, joined, passage_start
from training.steps import padding_mask
from training.words import word_tokenizer

from service.modeling.spec import SpanHead


def span_loss(scores: Tensor, batch: StepBatch) -> Tensor:
    """Return the mean cross entropy of the first and the last word over the steps of each row. scores: (rows, steps, 2)."""
    padding = padding_mask(batch.lengths, scores.shape[1])[:, :, None]
    return nn.functional.cross_entropy(scores.masked_fill(padding, -math.inf), batch.targets)


class SpanFinder(Recipe):
    task = Spans()
    description = "The span of a passage that answers a question"
    template = Path(__file__).with_name("spans.card.md")
    defaults = defaults(epochs=8)
    loss = staticmethod(span_loss)

    def prepare(self, parts: list[list[Question]], settings: Settings) -> Prepared:
        tokenizer = word_tokenizer([joined(example) for example in parts[0]], settings.minimum_count)
        rows = [
            [
                Row(
                    torch.tensor(tokenizer.encode(joined(example)).ids),
                    torch.tensor([example.start, example.end]) + passage_start(example),
                )
                for example in part
            ]
            for part in parts
        ]
        return Prepared(rows, tokenizer.get_vocab_size(), 2, SpanHead(kind="span"), tokenizer.to_str(pretty=True))

    def answer(self, scores: Tensor, example: Question, prepared: Prepared) -> Any:
        """Return the span with the highest product of both probabilities whose end is not before its start."""
        both = scores[:, 0, None] + scores[None, :, 1]
        best = int(both.masked_fill(torch.ones_like(both).tril(-1).bool(), -math.inf).argmax())
        start, end = divmod(best, len(scores))
        return start - passage_start(example), end - passage_start(example)


if __name__ == "__main__":
    sys.exit(main(SpanFinder(), "facts"))
