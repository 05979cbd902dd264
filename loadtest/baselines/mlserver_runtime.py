"""The model as a runtime of MLServer."""

from __future__ import annotations

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse

from loadtest.baselines import classifier


class Classifier(MLModel):  # type: ignore[misc] # the package is in another environment
    async def load(self) -> bool:
        self._scores = classifier.load()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = self._scores(StringCodec.decode_input(payload.inputs[0]))
        output = NumpyCodec.encode_output("scores", np.array(rows, np.float32))
        return InferenceResponse(model_name=self.name, id=payload.id, outputs=[output])
