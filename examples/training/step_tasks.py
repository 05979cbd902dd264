"""The requests of the recipes with an output per step to the service, and their figures of quality. Requires the standard library only.

Answers from the service and from PyTorch have the same form, so that one function judges both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import uuid4

from training.service import Service
from training.step_sets import Question, TaggedWords

INPUTS_PER_REQUEST = 50
CALLERS = 8
"""Sessions that are open at once."""
BOUNDARY = ord("\n")
"""The byte before and after every sequence of a language model."""
SEPARATOR = "[sep]"
"""The word between a question and its passage."""
SAME = "*"
"""The ending of a word of the passage that the question has too."""


class Task(ABC):
    """A kind of set, and how to evaluate a model on it."""

    kind: str
    """The kind of set in `step_sets.py`."""

    head: str
    """The kind of head in model.toml."""

    figure: str
    """The main figure of quality."""

    unit: str
    """The text after the figure in a sentence."""

    quick_examples = 200
    """Examples of the test part in a quick trial."""

    @abstractmethod
    def ask(self, service: Service, model: str, examples: list[Any]) -> list[Any]:
        """Return the model's answer to each example."""

    @abstractmethod
    def quality(self, examples: list[Any], answers: list[Any]) -> dict[str, float]:
        """Return the figures of quality by name, the main figure first."""


class Tags(Task):
    """A label for every word. An answer is a list of labels."""

    kind, head, figure, unit = "tags", "tag", "accuracy", "% of the labels"

    def ask(self, service: Service, model: str, examples: list[TaggedWords]) -> list[list[str]]:
        inputs = [" ".join(example.words) for example in examples]
        return [output["labels"] for output in outputs(service, model, inputs)]

    def quality(self, examples: list[TaggedWords], answers: list[list[str]]) -> dict[str, float]:
        """Return percentages: of correct labels, and the mean over the labels of their F1."""
        pairs = [pair for each, labels in zip(examples, answers, strict=True) for pair in zip(each.labels, labels, strict=True)]
        accuracy = 100 * sum(label == answer for label, answer in pairs) / len(pairs)
        scores = [f1(pairs, label) for label in sorted({label for label, _ in pairs})]
        return {"accuracy": accuracy, "f1": 100 * sum(scores) / len(scores)}


class Language(Task):
    """The next byte after every byte. An answer is the logarithm of the probability of each byte of a line, and of its end."""

    kind, head, figure, unit = "text", "next", "perplexity", "perplexity of a byte"
    quick_examples = 20

    def ask(self, service: Service, model: str, examples: list[str]) -> list[list[float]]:
        """Send every line through a session, one byte in a chunk."""
        with ThreadPoolExecutor(CALLERS) as callers:
            return list(callers.map(partial(self._line, service, model), examples))

    def quality(self, examples: list[str], answers: list[list[float]]) -> dict[str, float]:
        """Return the perplexity: the exponential of the mean of the negative logarithms."""
        logarithms = [value for answer in answers for value in answer]
        return {"perplexity": math.exp(-sum(logarithms) / len(logarithms))}

    def _line(self, service: Service, model: str, line: str) -> list[float]:
        sent = [BOUNDARY, *line.encode()]
        session = f"line-{uuid4().hex}"
        answer = []
        for index, (byte, following) in enumerate(zip(sent, [*sent[1:], BOUNDARY], strict=True)):
            chunk = {"model": model, "session": session, "inputs": [[byte]], "steps": index, "end": index == len(sent) - 1}
            [output] = service.fetch_json("/infer", chunk)["outputs"]
            answer.append(math.log(max(dict(zip(output["ids"], output["scores"], strict=True))[following], 1e-30)))
        return answer


class Spans(Task):
    """The answer to a question as a span of a passage. An answer is the first and the last word of the span in the passage."""

    kind, head, figure, unit = "spans", "span", "exact", "% of the spans exact"

    def ask(self, service: Service, model: str, examples: list[Question]) -> list[tuple[int, int]]:
        found = outputs(service, model, [joined(example) for example in examples])
        starts = [passage_start(example) for example in examples]
        return [(output["start"] - start, output["end"] - start) for output, start in zip(found, starts, strict=True)]

    def quality(self, examples: list[Question], answers: list[tuple[int, int]]) -> dict[str, float]:
        """Return percentages: of exact spans, and the mean F1 of the words of the span."""
        exact = [(example.start, example.end) == answer for example, answer in zip(examples, answers, strict=True)]
        overlaps = [overlap((each.start, each.end), answer) for each, answer in zip(examples, answers, strict=True)]
        return {"exact": 100 * sum(exact) / len(exact), "f1": 100 * sum(overlaps) / len(overlaps)}


TASKS: dict[str, Task] = {task.kind: task for task in (Tags(), Language(), Spans())}


def outputs(service: Service, model: str, inputs: list[str]) -> Iterator[Any]:
    """Yield the output for each input."""
    for first in range(0, len(inputs), INPUTS_PER_REQUEST):
        yield from service.fetch_json("/infer", {"model": model, "inputs": inputs[first : first + INPUTS_PER_REQUEST]})[
            "outputs"
        ]


def joined(example: Question) -> str:
    """Return the input of a model of spans: the question, a separator, and the passage with marks at the words of the question."""
    asked = set(example.question.lower().split())
    passage = (f"{word}{SAME}" if word.lower() in asked else word for word in example.passage.split())
    return f"{example.question} {SEPARATOR} {' '.join(passage)}"


def passage_start(example: Question) -> int:
    """Return the step of the first word of the passage."""
    return len(example.question.split()) + 1


def f1(pairs: list[tuple[str, str]], label: str) -> float:
    """Return the F1 of a label, of pairs of right label and answer."""
    right = sum(pair == (label, label) for pair in pairs)
    return 2 * right / sum((pair[0] == label) + (pair[1] == label) for pair in pairs)


def overlap(span: tuple[int, int], answer: tuple[int, int]) -> float:
    """Return the F1 of the words of two spans."""
    shared = max(0, min(span[1], answer[1]) - max(span[0], answer[0]) + 1)
    return 2 * shared / (span[1] - span[0] + answer[1] - answer[0] + 2)
