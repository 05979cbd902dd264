"""Small shapes through both CUDA kernels of the LSTM, for a sanitizer that watches every access: `python -m tests.gpu.small_lstm`."""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each array an allocation of its own, so that its end is one

import torch

from kernels.contract import Outputs, Ragged
from tests.kernels.families import Form

SHAPES = [("cluster", 40), ("cluster", 200), ("grid", 40), ("grid", 272)]


def main() -> None:
    form = Form("lstm")
    for backend, hidden in SHAPES:
        given = form.given([3, 0, 5, 1, 2, 2, 1, 4, 3, 2], hidden, 8, storage=torch.float16)
        x, weights, state = given.mapped(torch.Tensor.cuda)
        gates = torch.addmm(weights.bias, x.data.half(), weights.input)
        encoded = form.run(
            Ragged(gates, x.offsets),
            type(weights)(None, weights.recurrent, None),
            state,
            want=Outputs(steps=True, last=True, mean=True, max=True),
            backend=backend,
        )
        assert bool(encoded.steps is not None and encoded.steps.isfinite().all())


if __name__ == "__main__":
    main()
