"""The activations of model.toml as functions."""

from __future__ import annotations

from kernels.activations import Activation
from service.modeling.spec import activations


def kernel_activation(activation: activations.Activation) -> Activation:
    """Return the function that model.toml names."""
    return Activation(activation.kind, activation.parameters)
