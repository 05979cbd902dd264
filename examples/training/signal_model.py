"""A model over rows of numbers with an output per step: scales the rows, then runs an encoder and a linear layer over each step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from service.modeling.spec import BatchNormLayer, ConvLayer, Head, Layer, ModelSpec, SequenceInput
from training.convolutions import parameters
from training.step_model import StepModel
from training.steps import without_padding

EPSILON = BatchNormLayer(kind="batch_norm").epsilon


class SignalModel(StepModel):
    """The first layer of the model folder scales each column by the mean and the variance of the training rows: clients send raw rows.

    rows: (any, columns), the rows of the training part. front: the width of a causal convolution with ReLU below the encoder, or 0.
    """

    norm: Tensor
    """(4, columns): gain, offset, mean and variance, as in the model folder."""

    def __init__(
        self,
        family: str,
        rows: Tensor,
        hidden: int,
        outputs: int,
        *,
        causal: bool,
        dropout: float = 0.0,
        front: int = 0,
    ) -> None:
        columns = rows.shape[1]
        super().__init__(family, None, hidden if front else columns, hidden, outputs, causal=causal, dropout=dropout)
        self.front = nn.Conv1d(columns, hidden, front) if front else None
        ones, zeros = torch.ones(columns), torch.zeros(columns)
        self.register_buffer("norm", torch.stack([ones, zeros, rows.mean(0), rows.var(0, correction=0)]).half().float())

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        """Return (rows, steps, outputs) of (rows, steps, columns)."""
        return super().forward(self.below_encoder(inputs, lengths), lengths)

    def below_encoder(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        """Return the inputs of the encoder."""
        gain, offset, mean, variance = self.norm
        scaled: Tensor = gain * (inputs - mean) / (variance + EPSILON).sqrt() + offset
        if self.front is None:
            return scaled
        before = (self.front.kernel_size[0] - 1, 0)
        convolved: Tensor = self.front(pad(without_padding(scaled, lengths).transpose(1, 2), before))
        return convolved.relu().transpose(1, 2)

    @property
    def layers(self) -> tuple[Layer, ...]:
        front = self.front and ConvLayer(
            kind="conv", filters=self.front.out_channels, width=self.front.kernel_size[0], padding="causal"
        )
        return (BatchNormLayer(kind="batch_norm"), *((front,) if front else ()), *self.encoder.layers)

    def tensors(self) -> dict[str, Tensor]:
        front = parameters(self.front, "layers.1") if self.front else {}
        head = {"head.weight": self.head.weight.T, "head.bias": self.head.bias}
        return {"layers.0.norm": self.norm, **front, **self.encoder.tensors(2 if self.front else 1), **head}

    def spec(self, name: str, description: str, max_steps: int, head: Head) -> ModelSpec:
        features = SequenceInput(kind="features", features=self.norm.shape[1], max_steps=max_steps)
        return ModelSpec(name=name, description=description, precision="float16", input=features, layers=self.layers, head=head)
