"""Defines the program of an archive, and the machine that carries out its calls. Both kinds of archives share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Machine(Protocol):
    """Carries out the calls of a program: on signals to translate it, or on tensors to run it."""

    def constant(self, name: str, tensor: Tensor) -> Any:
        """Return the value of a tensor in the archive."""

    def is_tensor(self, value: Any) -> bool:
        """Whether a value is a tensor, rather than a number or a list."""

    def size(self, value: Any) -> list[int]:
        """Return the shape of a tensor."""

    def number(self, value: Any) -> Any:
        """Return the number in a tensor with one entry; raises ImportRefused if it depends on the input."""

    def operate(self, name: str, overload: str | None, positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return the result of an operator of torch: a value, or a list of several."""


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """An input of a program. has_ids: whether its numbers are whole, or None if the archive does not say; shape: None without one."""

    name: str
    has_ids: bool | None = None
    shape: tuple[int | None, ...] | None = None


class Program(Protocol):
    """A program of an archive."""

    @property
    def inputs(self) -> Sequence[ProgramInput]:
        """The inputs without default values."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors of the archive by name."""

    def run(self, machine: Machine, inputs: Mapping[str, Any]) -> Any:
        """Return the first output."""
