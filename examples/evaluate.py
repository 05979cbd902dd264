"""Ask a running service the 500 TREC test questions and print how many of them each question-type model labels right.

Uses nothing but the standard library and the HTTP door, as any caller would.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trec import LABELS, TEST_FILE, Question, is_missing, read_questions, what_to_fetch

AT_ONCE = 50


def main(arguments: list[str] | None = None) -> int:
    """0 when the table was printed, 1 when the service does not answer, 2 when the questions are missing."""
    said = parse(arguments)
    if is_missing(said.data, TEST_FILE):
        print(what_to_fetch(TEST_FILE), file=sys.stderr)
        return 2
    questions = read_questions(said.data / TEST_FILE)
    try:
        rows = [evaluate(said.url, model, questions) for model in models(said.url)]
    except urllib.error.URLError as fault:
        print(
            f"no answer from {said.url} ({fault.reason}): start the service with make serve, or name it with --url",
            file=sys.stderr,
        )
        return 1
    print("\n".join(table(rows, len(questions))))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the questions, $DATA unless given")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the service, %(default)s unless given")
    said = parser.parse_args(arguments)
    said.data = Path(said.data) if said.data else None
    return said


def models(url: str) -> Iterator[str]:
    """The served models that answer with these labels."""
    for model in ask(f"{url}/models")["models"]:
        if set(model["head"].get("labels", [])) == set(LABELS):
            yield model["name"]


def evaluate(url: str, model: str, questions: list[Question]) -> dict[str, Any]:
    """One model's row: how many questions of each label it labels right, and the seconds that it took."""
    right, start = dict.fromkeys(LABELS, 0), time.monotonic()
    for first in range(0, len(questions), AT_ONCE):
        some = questions[first : first + AT_ONCE]
        answer = ask(f"{url}/infer", {"model": model, "inputs": [question.text for question in some]})
        for question, output in zip(some, answer["outputs"], strict=True):
            right[LABELS[question.label]] += output["label"] == LABELS[question.label]
    return {"model": f"{answer['model']} {answer['version']}", "right": right, "seconds": time.monotonic() - start}


def table(rows: list[dict[str, Any]], questions: int) -> Iterator[str]:
    yield f"| model | of {questions} questions right | accuracy | {' | '.join(LABELS)} | s |"
    yield f"|---|---|---|{'---|' * len(LABELS)}---|"
    for row in rows:
        right = sum(row["right"].values())
        by_label = " | ".join(str(row["right"][label]) for label in LABELS)
        yield f"| {row['model']} | {right} | {100 * right / questions:.1f} % | {by_label} | {row['seconds']:.1f} |"


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
