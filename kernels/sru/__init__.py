"""The simple recurrent unit over ragged batches, one layer in one direction or in both.

    f = sigmoid(u1 + v_f * c[t-1] + b_f)         c[t] = f * c[t-1] + (1 - f) * u0
    r = sigmoid(u2 + v_r * c[t-1] + b_r)         h[t] = r * g(c[t]) + (1 - r) * skip

Lei et al., EMNLP 2018; without v it is the first version of that paper. g is the identity or tanh; the skip is a block of its own,
the scaled input, or nothing.
"""

from kernels.backend import AUTO, Backend, Choice, cached_choice, only_by_name, takes_everything
from kernels.contract import Encoded, Outputs, Ragged, SRUState, SRUWeights, check_both, check_sru
from kernels.scan.launch import refused
from kernels.slots import by_slot
from kernels.sru import framework, launch, reference

BACKENDS = (
    Backend("fused", launch.sru, refused, together=launch.both),
    Backend("framework", by_slot(framework.sru), takes_everything),
    Backend("reference", by_slot(reference.sru), only_by_name),
)
_chosen = cached_choice(lambda: BACKENDS)


def choice(weights: SRUWeights, backend: str = AUTO) -> Choice:
    """The backend that `sru` and `both` take for these weights."""
    return _chosen(weights.bias.device, weights.bias.dtype, weights.hidden, backend)


def sru(x: Ragged, weights: SRUWeights, state: SRUState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, going on from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, 3 or 4 x hidden) blocks when weights.input is None, or (tokens,) ids for a table. Shapes,
    blocks and outputs are those of `kernels.contract`; raises ContractError when they do not fit.
    """
    check_sru(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded


def both(
    x: Ragged,
    weights: tuple[SRUWeights, SRUWeights],
    states: tuple[SRUState, SRUState] | None = None,
    *,
    want: Outputs,
    backend: str = AUTO,
) -> Encoded:
    """Encode every row of `x` forward and backward, by a pair of weights of the same form, going on from a pair of states.

    Outputs are joined as [forward | backward], the steps in the order of the tokens; the state is the pair of states.
    """
    check_both(check_sru, x, weights, states)
    encoded: Encoded = choice(weights[0], backend).backend.both(x, weights, states, want=want)
    return encoded
