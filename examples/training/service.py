"""Starts the service, and sends texts to it over HTTP. Requires the standard library only: it is an ordinary HTTP client."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from training.text_sets import Example

TEXTS_PER_REQUEST = 50


class Answers(NamedTuple):
    """The label of each text, and the name and the version of the model that answered."""

    model: str
    labels: list[str]


class Service:
    """A service at an address, with the key that it needs if it has keys."""

    def __init__(self, url: str, key_file: Path | None = None, ca: Path | None = None) -> None:
        self.url = url
        self._key = (key_file.read_text() if key_file else os.environ.get("SEQSERVE_CLIENT_KEY", "")).strip()
        self._tls = ssl.create_default_context(cafile=ca)

    def fetch_json(self, path: str, body: Any = None) -> Any:
        return self._fetch(path, None if body is None else json.dumps(body).encode(), None)

    def delete(self, path: str) -> None:
        self._fetch(path, None, "DELETE")

    def _fetch(self, path: str, data: bytes | None, method: str | None) -> Any:
        """Return the decoded answer. Without a method, a request with data is a POST and any other a GET."""
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method=method)
        if self._key:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        with urllib.request.urlopen(request, timeout=60, context=self._tls) as answer:
            return json.load(answer)

    def models(self) -> list[Any]:
        """Return the descriptions of the served models."""
        models: list[Any] = self.fetch_json("/models")["models"]
        return models

    def classify(self, model: str, examples: list[Example]) -> Answers:
        """Return the model's answers to the texts of the examples."""
        answered, labels = model, []
        for first in range(0, len(examples), TEXTS_PER_REQUEST):
            inputs = [example.text for example in examples[first : first + TEXTS_PER_REQUEST]]
            answer = self.fetch_json("/infer", {"model": model, "inputs": inputs})
            answered = f"{answer['model']} {answer['version']}"
            labels += [output["label"] for output in answer["outputs"]]
        return Answers(answered, labels)

    def accuracy(self, model: str, examples: list[Example]) -> float:
        """Return the percentage of examples with the correct label."""
        labels = self.classify(model, examples).labels
        return 100 * sum(label == example.label for label, example in zip(labels, examples, strict=True)) / len(examples)


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process on this machine and of its children, in seconds."""
    folder = Path(f"/proc/{pid}")
    user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    children = [int(child) for task in (folder / "task").iterdir() for child in (task / "children").read_text().split()]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


@contextmanager
def running(models: Path, device: str) -> Iterator[Service]:
    """Run the service with a models folder until the end of the block. Its log goes to the standard error."""
    command = [sys.executable, "-m", "service", "serve", "--models", str(models), "--device", device, "--strict"]
    process = subprocess.Popen([*command, "--port", "0", "--grpc-port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready = (re.search(r"ready on (http://\S+)", line) for line in process.stdout)
        address = next((found[1] for found in ready if found), None)
        if address is None:
            raise RuntimeError(f"the service ended with status {process.wait()}: its log is above")
        yield Service(address)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
        process.stdout.close()
