"""The model as a handler of TorchServe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ts.torch_handler.base_handler import BaseHandler

from loadtest.baselines import classifier


class Classifier(BaseHandler):  # type: ignore[misc] # the package is in another environment
    def initialize(self, context: Any) -> None:
        self._scores = classifier.load()
        self.initialized = True

    def handle(self, data: Sequence[Mapping[str, str]], context: Any) -> list[dict[str, list[float]]]:
        """Return the answers to a batch of requests."""
        return [{"scores": row} for row in self._scores([request["body"] for request in data])]
