"""The backend type of the convolution family, which runs stacks and text CNNs as well as single convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels.backend import Backend
from kernels.conv.layer_by_layer import stack_of, text_cnn_of


@dataclass(frozen=True, slots=True)
class ConvBackend(Backend):
    """A backend of convolutions. `stack` and `text_cnn` are None where the backend runs them layer by layer."""

    stack: Callable[..., Any] | None = None
    text_cnn: Callable[..., Any] | None = None

    @property
    def run_stack(self) -> Callable[..., Any]:
        return self.stack or stack_of(self.run)

    @property
    def run_text_cnn(self) -> Callable[..., Any]:
        return self.text_cnn or text_cnn_of(self.run)
