"""Send the test part of a set of texts to a running service and print the accuracy of each model with its labels.

Requires the standard library only: it is an ordinary HTTP client.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.service import Service
from training.text_sets import FOLDS, Example, MissingSet, labels_of, read_test


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if the table was printed, 1 if the service does not answer, 2 if the texts are missing."""
    flags = parse(arguments)
    try:
        examples = read_test(flags.data, flags.set, flags.fold)
    except MissingSet as error:
        print(error, file=sys.stderr)
        return 2
    labels = labels_of(flags.set, examples)
    try:
        service = Service(flags.url, flags.key_file, flags.ca)
        names = [flags.model] if flags.model else models(service, labels)
        rows = [evaluate(service, model, labels, examples) for model in names]
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
    print("\n".join(table(rows, labels, len(examples))))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the sets (default: $DATA)")
    parser.add_argument("--set", default="trec", help="name of the set (default: %(default)s)")
    parser.add_argument("--fold", type=int, choices=range(FOLDS), default=0, help="the tested tenth of a set without parts")
    parser.add_argument("--model", help="name of the model (default: every model with these labels)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (default: %(default)s)")
    parser.add_argument("--key-file", type=Path, help="file with the key to send (default: $SEQSERVE_CLIENT_KEY is the key)")
    parser.add_argument("--ca", type=Path, help="authority of the service's certificate (default: the system's authorities)")
    flags = parser.parse_args(arguments)
    flags.data = Path(flags.data) if flags.data else None
    return flags


def models(service: Service, labels: tuple[str, ...]) -> Iterator[str]:
    """Yield the served models that have these labels."""
    for model in service.models():
        if set(model["head"].get("labels", [])) == set(labels):
            yield model["name"]


def evaluate(service: Service, model: str, labels: tuple[str, ...], examples: list[Example]) -> dict[str, Any]:
    """Return a model's row of the table: correct answers by label, and the seconds that they took."""
    correct, start = dict.fromkeys(labels, 0), time.monotonic()
    answers = service.classify(model, examples)
    for example, label in zip(examples, answers.labels, strict=True):
        correct[example.label] += label == example.label
    return {"model": answers.model, "correct": correct, "seconds": time.monotonic() - start}


def table(rows: list[dict[str, Any]], labels: tuple[str, ...], examples: int) -> Iterator[str]:
    yield f"| model | correct of {examples} texts | accuracy | {' | '.join(labels)} | s |"
    yield f"|---|---|---|{'---|' * len(labels)}---|"
    for row in rows:
        correct = sum(row["correct"].values())
        by_label = " | ".join(str(row["correct"][label]) for label in labels)
        yield f"| {row['model']} | {correct} | {100 * correct / examples:.1f} % | {by_label} | {row['seconds']:.1f} |"


if __name__ == "__main__":
    sys.exit(main())
