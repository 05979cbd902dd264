"""Send the 500 TREC test questions to a running service and print the accuracy of each question-type model.

Requires the standard library only: it is an ordinary HTTP client.
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

from trec import LABELS, TEST_FILE, Question, download_instructions, is_missing, read_questions

QUESTIONS_PER_REQUEST = 50


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if the table was printed, 1 if the service does not answer, 2 if the questions are missing."""
    flags = parse(arguments)
    if is_missing(flags.data, TEST_FILE):
        print(download_instructions(TEST_FILE), file=sys.stderr)
        return 2
    questions = read_questions(flags.data / TEST_FILE)
    try:
        rows = [evaluate(flags.url, model, questions) for model in models(flags.url)]
    except urllib.error.URLError as error:
        print(
            f"no answer from {flags.url} ({error.reason}): start the service with make serve, or pass its address with --url",
            file=sys.stderr,
        )
        return 1
    print("\n".join(table(rows, len(questions))))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the questions (default: $DATA)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (default: %(default)s)")
    flags = parser.parse_args(arguments)
    flags.data = Path(flags.data) if flags.data else None
    return flags


def models(url: str) -> Iterator[str]:
    """Yield the served models that have these labels."""
    for model in fetch_json(f"{url}/models")["models"]:
        if set(model["head"].get("labels", [])) == set(LABELS):
            yield model["name"]


def evaluate(url: str, model: str, questions: list[Question]) -> dict[str, Any]:
    """Return a model's row of the table: correct answers by label, and the seconds that they took."""
    correct, start = dict.fromkeys(LABELS, 0), time.monotonic()
    for first in range(0, len(questions), QUESTIONS_PER_REQUEST):
        batch = questions[first : first + QUESTIONS_PER_REQUEST]
        answer = fetch_json(f"{url}/infer", {"model": model, "inputs": [question.text for question in batch]})
        for question, output in zip(batch, answer["outputs"], strict=True):
            correct[LABELS[question.label]] += output["label"] == LABELS[question.label]
    return {"model": f"{answer['model']} {answer['version']}", "correct": correct, "seconds": time.monotonic() - start}


def table(rows: list[dict[str, Any]], questions: int) -> Iterator[str]:
    yield f"| model | correct of {questions} questions | accuracy | {' | '.join(LABELS)} | s |"
    yield f"|---|---|---|{'---|' * len(LABELS)}---|"
    for row in rows:
        correct = sum(row["correct"].values())
        by_label = " | ".join(str(row["correct"][label]) for label in LABELS)
        yield f"| {row['model']} | {correct} | {100 * correct / questions:.1f} % | {by_label} | {row['seconds']:.1f} |"


def fetch_json(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
