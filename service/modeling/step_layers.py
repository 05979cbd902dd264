"""Layers that compute each step alone: dense layers, activations and norms, over vectors or over token ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.activations import Activation
from kernels.framework import linear
from kernels.norm import layer_norm
from kernels.pooling import pool_steps
from kernels.ragged import Encoded, Outputs, Ragged
from service.modeling.activations import kernel_activation
from service.modeling.runnable_layer import EMBEDDED, FOLDED, RunnableLayer, embed_ids
from service.modeling.spec.layers import ActivationLayer, BatchNormLayer, DenseLayer, EmbeddingLayer, Layer, LayerNormLayer

STEP_LAYERS = (DenseLayer, ActivationLayer, LayerNormLayer, BatchNormLayer)
FRAMEWORK = "framework"
"""The only backend: a few operations of torch for all steps of a batch."""


class StepFunction(ABC):
    """A function of the vector of a step."""

    tensors: tuple[Tensor, ...] = ()

    @abstractmethod
    def __call__(self, steps: Tensor) -> Tensor:
        """Return (tokens, outputs) float32. steps: (tokens, inputs)."""


class StepLayer(RunnableLayer):
    """A function of every step. Steps do not depend on each other, so a sequence may arrive in chunks without a state."""

    def __init__(self, function: StepFunction, outputs: int) -> None:
        """outputs: width of the function's vectors."""
        self._function = function
        self._outputs = outputs
        self._table: Tensor | None = None
        """The embedding, or the function's vectors of all ids, for a layer that takes ids."""

    def __call__(self, x: Ragged, want: Outputs) -> Encoded:
        vectors = x.data if self._table is None else embed_ids(x, self._table).data
        steps = vectors.float() if self.takes_ids == FOLDED else self._function(vectors)
        return pool_steps(steps, x.offsets, want, directions=1)

    @property
    def streams(self) -> bool:
        return True

    @property
    def resumes_for_free(self) -> bool:
        return True

    def embed(self, table: Tensor) -> None:
        self._table, self.takes_ids = table, EMBEDDED

    def fold(self, table: Tensor) -> None:
        self._table, self.takes_ids = self._function(table).to(table.dtype), FOLDED

    @property
    def folded_columns(self) -> int:
        return self._outputs

    def backend(self) -> str:
        return FRAMEWORK

    def tensors(self) -> list[Tensor]:
        return [*self._function.tensors, *([] if self._table is None else [self._table])]


class Dense(StepFunction):
    """``activation(x @ weight + bias)``."""

    def __init__(self, weight: Tensor, bias: Tensor, activation: Activation) -> None:
        self.tensors = weight, bias
        self._activation = activation

    def __call__(self, steps: Tensor) -> Tensor:
        return self._activation(linear(steps, *self.tensors))


class Pointwise(StepFunction):
    """An activation of every number."""

    def __init__(self, activation: Activation) -> None:
        self._activation = activation

    def __call__(self, steps: Tensor) -> Tensor:
        return self._activation(steps.float())


class LayerNorm(StepFunction):
    """A layer norm over the numbers of a step."""

    def __init__(self, norm: Tensor, epsilon: float) -> None:
        self.tensors = (norm,)
        self._epsilon = epsilon

    def __call__(self, steps: Tensor) -> Tensor:
        return layer_norm(steps, self.tensors[0], self._epsilon)


class BatchNorm(StepFunction):
    """A batch norm by stored statistics: a factor and an offset for each number of a step (Ioffe and Szegedy 2015)."""

    def __init__(self, norm: Tensor, epsilon: float) -> None:
        gain, offset, mean, variance = norm.float()
        scale = gain / torch.sqrt(variance + epsilon)
        self.tensors = scale, offset - mean * scale

    def __call__(self, steps: Tensor) -> Tensor:
        scale, offset = self.tensors
        return torch.addcmul(offset, steps.float(), scale)


def build_embedding(layer: EmbeddingLayer) -> StepLayer:
    """Return the layer of a model that has no layer above its embedding."""
    return StepLayer(Pointwise(Activation("none")), layer.width)


def build_step_layer(layer: Layer, inputs: int, weights: Mapping[str, Tensor]) -> StepLayer:
    """Return the runnable form of a layer in STEP_LAYERS. inputs: its input width; weights: already on their device."""
    return StepLayer(_function(layer, weights), layer.output_width(inputs))


def _function(layer: Layer, weights: Mapping[str, Tensor]) -> StepFunction:
    match layer:
        case DenseLayer():
            return Dense(weights["weight"], weights["bias"], kernel_activation(layer.activation))
        case LayerNormLayer():
            return LayerNorm(weights["norm"], layer.epsilon)
        case BatchNormLayer():
            return BatchNorm(weights["norm"], layer.epsilon)
    assert isinstance(layer, ActivationLayer)
    return Pointwise(kernel_activation(layer.activation))
