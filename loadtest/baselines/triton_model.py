"""The model for the Python backend of Triton, which puts the requests of a batch into one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

from loadtest.baselines import classifier


class TritonPythonModel:
    def initialize(self, arguments: dict[str, str]) -> None:
        self._scores = classifier.load()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return one response for each request; each request has one text."""
        texts = [triton.get_input_tensor_by_name(request, "text").as_numpy()[0, 0].decode() for request in requests]
        rows = np.array(self._scores(texts), np.float32)
        tensors = (triton.Tensor("scores", row[None]) for row in rows)
        return [triton.InferenceResponse(output_tensors=[tensor]) for tensor in tensors]
