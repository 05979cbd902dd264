"""The base class of the encoders: from vectors of steps to one vector per step, or to one vector per sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from service.modeling.spec.layers import Layer
from training.steps import max_over_time


class Encoder(nn.Module, ABC):
    """Arguments: the width of the inputs, and the hidden units per direction, or the filters. With `causal`, no step depends on a later
    step, so that a model with this encoder can have sessions."""

    layers: tuple[Layer, ...]
    """The layers of model.toml."""

    outputs: int
    """The width of a vector that the encoder returns."""

    description: str
    """The description in the model card."""

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        """Return (rows, outputs) of (rows, steps, inputs): the maximum over the steps of each row, without padding."""
        return max_over_time(self.steps(inputs, lengths), lengths)

    @abstractmethod
    def steps(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        """Return (rows, steps, outputs) of (rows, steps, inputs). Padding beyond a row's length must not change the steps before it;
        the output for the padding itself is arbitrary."""

    @abstractmethod
    def tensors(self, first: int) -> dict[str, Tensor]:
        """Return views of the parameters, in the names and layouts of the model folder. first: the index of the first of `layers`."""
