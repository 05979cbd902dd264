"""Train a tagger of any of six families in plain PyTorch, and write it as a model folder with a card.

The data is any set of words with labels in the format of `training/step_sets.py`; `make_sets.py` makes two. The model takes a text of
words with spaces between them, and answers with a label for each word.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from training.step_fitting import NO_TARGET, Row, Settings, step_loss
from training.step_recipe import Prepared, Recipe, defaults, main
from training.step_sets import TaggedWords
from training.step_tasks import Tags
from training.words import word_tokenizer

from service.modeling.spec import TagHead


class Tagger(Recipe):
    task = Tags()
    description = "A label for every word"
    template = Path(__file__).with_name("tags.card.md")
    defaults = defaults()
    loss = staticmethod(step_loss)

    def prepare(self, parts: list[list[TaggedWords]], settings: Settings) -> Prepared:
        """Return the rows. A label that the training part lacks is no target."""
        labels = sorted({label for example in parts[0] for label in example.labels})
        index = {label: number for number, label in enumerate(labels)}
        tokenizer = word_tokenizer([" ".join(example.words) for example in parts[0]], settings.minimum_count)
        rows = [
            [
                Row(
                    torch.tensor(tokenizer.encode(" ".join(example.words)).ids),
                    torch.tensor([index.get(label, NO_TARGET) for label in example.labels]),
                )
                for example in part
            ]
            for part in parts
        ]
        head = TagHead(kind="tag", labels=tuple(labels))
        return Prepared(rows, tokenizer.get_vocab_size(), len(labels), head, tokenizer.to_str(pretty=True))

    def answer(self, scores: Tensor, example: TaggedWords, prepared: Prepared) -> Any:
        assert isinstance(prepared.head, TagHead)
        return [prepared.head.labels[index] for index in scores.argmax(1).tolist()]


if __name__ == "__main__":
    sys.exit(main(Tagger(), "kjv"))
