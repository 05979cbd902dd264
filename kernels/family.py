"""A recurrent cell in one record: its gates, weights, state and backends, and calls of the backend that its weights choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kernels.backend import AUTO, Backend, Choice, accepts_everything, cached_choice, only_by_name
from kernels.ragged import (
    Encoded,
    Outputs,
    Ragged,
    RunKernel,
    check_both_directions,
    check_levels,
    state_arrays,
    with_state_slots,
)


@dataclass(frozen=True)
class Family:
    """A recurrent cell.

    name: of its package; weights, state: the classes of its weights and of its state; check: raises ContractError unless data, weights and
    state have consistent shapes; reference, framework: the functions of the reference in float64 and of torch's operations, for states
    without slots; compiled: the backends for a GPU and a CPU, the fastest first; table_gates: the blocks that a table of token ids has
    besides the gates.
    """

    name: str
    weights: type[Any]
    state: type[Any]
    check: Callable[[Ragged, Any, Any], None]
    reference: RunKernel
    framework: RunKernel
    compiled: tuple[Backend, ...] = ()
    table_gates: tuple[str, ...] = ()

    @property
    def gates(self) -> tuple[str, ...]:
        """The blocks of hidden columns of the input weights, in their order."""
        gates: tuple[str, ...] = self.weights.gates
        return gates

    @cached_property
    def backends(self) -> tuple[Backend, ...]:
        """All backends, from the fastest to the fallback, and the reference."""
        return (
            *self.compiled,
            Backend("framework", with_state_slots(self.framework), accepts_everything, runs=None),
            Backend("reference", with_state_slots(self.reference), only_by_name, runs=None),
        )

    @property
    def runs_levels(self) -> bool:
        """Whether kernels run several levels in one direction at once."""
        return any(backend.levels is not None for backend in self.backends)

    def zero_state(self, weights: Any, entries: int) -> Any:
        """Return a state of zeros with this number of rows or slots, on the device of the weights."""
        return self.state(*(weights.zeros(name, entries) for name in state_arrays(self.state)))

    def choice(self, weights: Any, backend: str = AUTO, levels: int = 1) -> Choice:
        """Return the backend that runs these weights, or `levels` levels of them."""
        return self._choose(backend, *weights.place, levels)

    def run(self, x: Ragged, weights: Any, state: Any = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
        """Encode every row of `x`, starting from `state` (zeros when None). The family's types describe shapes and the order of gates;
        raises ContractError for inconsistent shapes."""
        self.check(x, weights, state)
        encoded: Encoded = self.choice(weights, backend).backend.run(x, weights, state, want=want)
        return encoded

    def bidirectional(
        self, x: Ragged, weights: tuple[Any, Any], states: tuple[Any, Any] | None = None, *, want: Outputs, backend: str = AUTO
    ) -> Encoded:
        """Encode every row of `x` forward and backward with a pair of weights of the same form, starting from a pair of states.

        The outputs are joined as [forward | backward], the steps in the order of the tokens; the state is the pair of states.
        """
        check_both_directions(self.check, x, weights, states)
        encoded: Encoded = self.choice(weights[0], backend).backend.run_bidirectional(x, weights, states, want=want)
        return encoded

    def levels(
        self, x: Ragged, weights: Sequence[Any], states: Sequence[Any] | None = None, *, want: Outputs, backend: str = AUTO
    ) -> Encoded:
        """Encode every row of `x` by several levels, of which each reads the steps of the level below.

        weights, states: of each level, from the first. The outputs are those of the last level; the state is a tuple of the levels'
        states.
        """
        check_levels(self.check, x, weights, states)
        encoded: Encoded = self.choice(weights[0], backend, len(weights)).backend.run_levels(x, weights, states, want=want)
        return encoded

    @cached_property
    def _choose(self) -> Callable[..., Choice]:
        return cached_choice(self.backends)
