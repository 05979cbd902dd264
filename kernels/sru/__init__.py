"""The simple recurrent unit over ragged batches, one layer in one direction or in both.

    f = sigmoid(u1 + v_f * c[t-1] + b_f)         c[t] = f * c[t-1] + (1 - f) * u0
    r = sigmoid(u2 + v_r * c[t-1] + b_r)         h[t] = r * g(c[t]) + (1 - r) * skip

Lei et al., EMNLP 2018; without v it is the first version of that paper (version 1). g is the identity or tanh. The skip is a block of
its own, scaled columns of the input, or zero.
"""

from kernels.backend import AUTO, Backend, Choice, accepts_everything, cached_choice, only_by_name
from kernels.cpu import cache
from kernels.ragged import Encoded, Outputs, Ragged, check_both_directions, with_state_slots
from kernels.scan.launch import describe, refuses
from kernels.sru import cpu, framework, fused, reference
from kernels.sru.types import SRUState, SRUWeights, check_sru

BACKENDS = (
    Backend("fused", fused.sru, refuses, describe, bidirectional=fused.bidirectional),
    Backend("cpu", cpu.sru, cache.refuses, bidirectional=cpu.bidirectional),
    Backend("framework", with_state_slots(framework.sru), accepts_everything),
    Backend("reference", with_state_slots(reference.sru), only_by_name),
)
_chosen = cached_choice(lambda: BACKENDS)


def choice(weights: SRUWeights, backend: str = AUTO) -> Choice:
    """Return the backend that `sru` and `bidirectional` choose for these weights."""
    return _chosen(weights.bias.device, weights.bias.dtype, weights.hidden, backend)


def sru(x: Ragged, weights: SRUWeights, state: SRUState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, starting from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, 3 or 4 x hidden) blocks when weights.input is None, or (tokens,) ids for a table.
    `kernels.sru.types` describes shapes and blocks; raises ContractError for inconsistent shapes.
    """
    check_sru(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded


def bidirectional(
    x: Ragged,
    weights: tuple[SRUWeights, SRUWeights],
    states: tuple[SRUState, SRUState] | None = None,
    *,
    want: Outputs,
    backend: str = AUTO,
) -> Encoded:
    """Encode every row of `x` forward and backward with a pair of weights of the same form, starting from a pair of states.

    The outputs are joined as [forward | backward], the steps in the order of the tokens; the state is the pair of states.
    """
    check_both_directions(check_sru, x, weights, states)
    encoded: Encoded = choice(weights[0], backend).backend.run_bidirectional(x, weights, states, want=want)
    return encoded
