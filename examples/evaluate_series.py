"""Send the test part of a set of time series to a running service and print the accuracy of each model with its labels.

Requires NumPy and the standard library only: it is an ordinary HTTP client.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import urllib.error
from pathlib import Path

from training import pages
from training.series_sets import MissingSet, Series, read
from training.service import Service

SERIES_PER_REQUEST = 20


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if the table was printed, 1 if the service does not answer, 2 if the series are missing."""
    flags = parse(arguments)
    try:
        series = read(flags.data, flags.set, "TEST")
        service = Service(flags.url, flags.key_file, flags.ca)
        rows = [row(service, model, series) for model in ([flags.model] if flags.model else models(service, series))]
    except MissingSet as error:
        print(error, file=sys.stderr)
        return 2
    except urllib.error.URLError as error:
        print(
            f"no answer from {flags.url} ({error.reason}): start the service, or pass its address with --url", file=sys.stderr
        )
        return 1
    print("\n".join(pages.table(("model", f"accuracy on {len(series)} series", "s"), rows)))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"), help="folder of the sets (default: $DATA)")
    parser.add_argument("--set", default="JapaneseVowels", help="name of the set (default: %(default)s)")
    parser.add_argument("--model", help="name of the model (default: every model with these labels and channels)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (default: %(default)s)")
    parser.add_argument("--key-file", type=Path, help="file with the key to send (default: $SEQSERVE_CLIENT_KEY is the key)")
    parser.add_argument("--ca", type=Path, help="authority of the service's certificate (default: the system's authorities)")
    flags = parser.parse_args(arguments)
    flags.data = Path(flags.data) if flags.data else None
    return flags


def models(service: Service, series: list[Series]) -> list[str]:
    """Return the served models with the labels and the channels of these series."""
    labels, channels = {one.label for one in series}, series[0].rows.shape[1]
    fitting = (model for model in service.models() if model["input"].get("features") == channels)
    return [model["name"] for model in fitting if set(model["head"].get("labels", [])) >= labels]


def row(service: Service, model: str, series: list[Series]) -> list[str]:
    start = time.monotonic()
    percent = accuracy(service, model, series)
    return [model, f"{percent:.1f} %", f"{time.monotonic() - start:.1f}"]


def accuracy(service: Service, model: str, series: list[Series]) -> float:
    """Return the percentage of series that the model labels correctly."""
    correct = 0
    for first in range(0, len(series), SERIES_PER_REQUEST):
        part = series[first : first + SERIES_PER_REQUEST]
        answer = service.fetch_json("/infer", {"model": model, "inputs": [one.rows.tolist() for one in part]})
        correct += sum(output["label"] == one.label for output, one in zip(answer["outputs"], part, strict=True))
    return 100 * correct / len(series)


if __name__ == "__main__":
    sys.exit(main())
