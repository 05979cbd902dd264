"""Runs the convolution's CUDA kernels on small shapes, for a memory sanitizer: `python -m tests.gpu.small_conv`."""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = (
    "1"  # a separate allocation per array, so that the sanitizer detects reads past its end
)

from typing import Any
from unittest.mock import patch

from torch import Tensor

from kernels.conv import product
from kernels.conv.plan import TileShape
from kernels.conv.types import ConvBlock
from kernels.ragged import Encoded, Outputs
from tests.gpu.inputs import made
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING, arrays
from tests.kernels.stacks import Maker

BACKEND = "fused"
CENTRED = Form("conv", width=3, left=1, right=1, activation="relu")
CAUSAL = Form("conv", width=3, left=4, dilation=2, activation="glu")
STRIDED = Form("conv", width=3, left=2, stride=2)
OF_VECTORS = Form("conv", width=3, activation="relu", ids="embedding")
OF_TABLES = Form("conv", width=3, left=2, activation="gelu", ids="tables")
LAST, MAXIMUM = Outputs(last=True), Outputs(max=True)
SHORT = [3, 0, 5, 1, 2, 2, 1, 4, 3, 2]
LONG = [150, 0, 40, 129]


def main() -> None:
    for shape, lengths in ((TileShape(1, 32), SHORT), (TileShape(2, 64), LONG)):
        with patch.object(product, "shape_for", lambda *_, shape=shape: shape):
            for form, want in (
                (CENTRED, MAXIMUM),
                (CAUSAL, EVERYTHING),
                (CAUSAL, LAST),
                (STRIDED, EVERYTHING),
                (OF_VECTORS, MAXIMUM),
            ):
                check(form.run(*made(form, lengths, 41, 65), want=want, backend=BACKEND))
            check(on_gpu(stack(lengths)).run(backend=BACKEND))
            check(on_gpu(stack(lengths, states=False)).run(want=LAST, backend=BACKEND))
    for lengths in (SHORT, LONG):
        check(OF_TABLES.run(*made(OF_TABLES, lengths, 41), backend=BACKEND))
        for ids in ("", "tables"):
            check(on_gpu(Maker(65).text_cnn(lengths, (3, 1, 4), (40, 3, 65), ids=ids, labels=6)).run(backend=BACKEND))


def stack(lengths: list[int], *, states: bool = True) -> Any:
    maker = Maker(33)
    layers = maker.causal(41, 3, activation="relu"), maker.causal(40, 3, dilation=2)
    projection = Maker(33).layer(40, 1)
    return maker.stack(lengths, ConvBlock(layers, residual=True, projection=projection, activation="relu"), with_states=states)


def on_gpu(problem: Any) -> Any:
    """Return the problem on the GPU in float16, with ids unchanged."""
    return problem.map_arrays(lambda array: (array.half() if array.is_floating_point() else array).cuda())


def check(encoded: Encoded) -> None:
    states = encoded.state if isinstance(encoded.state, tuple) else (encoded.state,)
    outputs = (encoded.steps, encoded.last, encoded.mean, encoded.max, encoded.scores)
    held = [
        array
        for array in (*outputs, *(values for state in states for values in arrays(state).values()))
        if isinstance(array, Tensor)
    ]
    assert held and all(bool(array.isfinite().all()) for array in held)


if __name__ == "__main__":
    main()
