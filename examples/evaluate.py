"""Send the 500 TREC test questions to a running service and print the accuracy of each question-type model.

Requires the standard library only: it is an ordinary HTTP client.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
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
        service = Service(flags.url, flags.key_file, flags.ca)
        rows = [evaluate(service, model, questions) for model in models(service)]
    except urllib.error.HTTPError as error:
        print(
            f"{flags.url} answers {error.code} {error.reason}: if it has keys, name a file with one with --key-file",
            file=sys.stderr,
        )
        return 1
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
    parser.add_argument("--key-file", type=Path, help="file with the key to send (default: $SEQSERVE_CLIENT_KEY is the key)")
    parser.add_argument("--ca", type=Path, help="authority of the service's certificate (default: the system's authorities)")
    flags = parser.parse_args(arguments)
    flags.data = Path(flags.data) if flags.data else None
    return flags


class Service:
    """A service at an address, with the key that it needs if it has keys."""

    def __init__(self, url: str, key_file: Path | None, ca: Path | None) -> None:
        self._url = url
        self._key = (key_file.read_text() if key_file else os.environ.get("SEQSERVE_CLIENT_KEY", "")).strip()
        self._tls = ssl.create_default_context(cafile=ca)

    def fetch_json(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, {"Content-Type": "application/json"})
        if self._key:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        with urllib.request.urlopen(request, timeout=60, context=self._tls) as answer:
            return json.load(answer)


def models(service: Service) -> Iterator[str]:
    """Yield the served models that have these labels."""
    for model in service.fetch_json("/models")["models"]:
        if set(model["head"].get("labels", [])) == set(LABELS):
            yield model["name"]


def evaluate(service: Service, model: str, questions: list[Question]) -> dict[str, Any]:
    """Return a model's row of the table: correct answers by label, and the seconds that they took."""
    correct, start = dict.fromkeys(LABELS, 0), time.monotonic()
    for first in range(0, len(questions), QUESTIONS_PER_REQUEST):
        batch = questions[first : first + QUESTIONS_PER_REQUEST]
        answer = service.fetch_json("/infer", {"model": model, "inputs": [question.text for question in batch]})
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


if __name__ == "__main__":
    sys.exit(main())
