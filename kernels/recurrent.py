"""What the packages of the recurrent families offer: a layer in one direction, in both directions, and several levels of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from kernels.backend import AUTO, Backend, Choice, cached_choice
from kernels.ragged import Encoded, LayerWeights, Outputs, Ragged, check_both_directions, check_levels

Weights = TypeVar("Weights", bound=LayerWeights)
State = TypeVar("State")


class RecurrentKernel(Generic[Weights, State]):
    """Checks the arguments of a recurrent family's calls, and runs them by the backend that it chooses for their weights."""

    def __init__(
        self,
        backends: Sequence[Backend],
        check: Callable[[Ragged, Weights, State | None], None],
        array: Callable[[Weights], Tensor],
    ) -> None:
        """check: raises ContractError for inconsistent shapes; array: returns an array that all weights have."""
        self._choose, self._check, self._array = cached_choice(backends), check, array

    def choice(self, weights: Weights, backend: str = AUTO, levels: int = 1) -> Choice:
        """Return the backend that runs these weights, or `levels` levels of them."""
        array = self._array(weights)
        return self._choose(array.device, array.dtype, weights.hidden, backend, weights.variants, weights.vector, levels)

    def run(self, x: Ragged, weights: Weights, state: State | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
        """Encode every row of `x`, starting from `state` (zeros when None). The family's types describe shapes and the order of gates;
        raises ContractError for inconsistent shapes."""
        self._check(x, weights, state)
        encoded: Encoded = self.choice(weights, backend).backend.run(x, weights, state, want=want)
        return encoded

    def bidirectional(
        self,
        x: Ragged,
        weights: tuple[Weights, Weights],
        states: tuple[State, State] | None = None,
        *,
        want: Outputs,
        backend: str = AUTO,
    ) -> Encoded:
        """Encode every row of `x` forward and backward with a pair of weights of the same form, starting from a pair of states.

        The outputs are joined as [forward | backward], the steps in the order of the tokens; the state is the pair of states.
        """
        check_both_directions(self._check, x, weights, states)
        encoded: Encoded = self.choice(weights[0], backend).backend.run_bidirectional(x, weights, states, want=want)
        return encoded

    def levels(
        self,
        x: Ragged,
        weights: Sequence[Weights],
        states: Sequence[State] | None = None,
        *,
        want: Outputs,
        backend: str = AUTO,
    ) -> Encoded:
        """Encode every row of `x` by several levels, of which each reads the steps of the level below.

        weights, states: of each level, from the first. The outputs are those of the last level; the state is a tuple of the levels'
        states.
        """
        check_levels(self._check, x, weights, states)
        encoded: Encoded = self.choice(weights[0], backend, len(weights)).backend.run_levels(x, weights, states, want=want)
        return encoded
