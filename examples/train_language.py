"""Train a language model over bytes, of any of six families, in plain PyTorch, and write it as a model folder with a card.

The data is any set of lines in the format of `training/step_sets.py`; `make_sets.py` makes two. The model takes the bytes of a line after a
line feed, and answers with the probability of every next byte. It is causal: `generate.py` and `evaluate_steps.py` send a session one byte
at a time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from training.step_fitting import Row, Settings, step_loss
from training.step_model import StepModel
from training.step_recipe import Prepared, Recipe, defaults, main
from training.step_tasks import BOUNDARY, Language

from service.modeling.spec import ModelSpec, NextHead

BYTES = 256


class LanguageModel(Recipe):
    task = Language()
    description = "The next byte of a text"
    template = Path(__file__).with_name("language.card.md")
    defaults = defaults(dropout=0.0, epochs=2)
    causal = True
    loss = staticmethod(step_loss)

    def prepare(self, parts: list[list[str]], settings: Settings) -> Prepared:
        """Return the rows: each byte is the target of the previous byte, and a line feed begins and ends a line."""
        rows = []
        for part in parts:
            lines = [torch.tensor([BOUNDARY, *line.encode(), BOUNDARY]) for line in part]
            rows.append([Row(line[:-1], line[1:]) for line in lines])
        return Prepared(rows, BYTES, BYTES, NextHead(kind="next", top=BYTES))

    def answer(self, scores: Tensor, example: str, prepared: Prepared) -> Any:
        targets = torch.tensor([*example.encode(), BOUNDARY])
        return scores.log_softmax(1).gather(1, targets[:, None])[:, 0].tolist()

    def spec(self, name: str, model: StepModel, prepared: Prepared) -> ModelSpec:
        """Return the spec. A session can only be forked if the embedding is not folded into a QRNN."""
        return super().spec(name, model, prepared).model_copy(update={"fold": "never"})


if __name__ == "__main__":
    sys.exit(main(LanguageModel(), "kjv"))
