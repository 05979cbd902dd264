"""Two directions of a layer over the same rows, as one: [forward | backward] along the width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs, Ragged, reversal

Run = Callable[..., Encoded]


def composed(run: Run) -> Run:
    """Both directions of what `run` does in one: the backward one reads every row back to front.

    weights: (forward, backward); states: a pair too, or None. The backward step of a token stands at that token; the state is the pair
    of states.
    """

    def both(x: Ragged, weights: tuple[Any, Any], states: tuple[Any, Any] | None, *, want: Outputs) -> Encoded:
        before = (None, None) if states is None else states
        forward = run(x, weights[0], before[0], want=want)
        backward = run(x.reversed(), weights[1], before[1], want=want)
        if backward.steps is not None:
            back = reversal(x.offsets, len(backward.steps))
            backward = replace(backward, steps=backward.steps.index_select(0, back))
        return replace(side_by_side((forward, backward)), state=(forward.state, backward.state))

    return both


def side_by_side(parts: Sequence[Encoded]) -> Encoded:
    """Outputs of the same rows, joined along their width; the state is the first part's."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> Tensor | None:
        given = [getattr(part, name) for part in parts]
        return None if given[0] is None else torch.cat(given, dim=1)

    return Encoded(parts[0].state, *(joined(name) for name in ("steps", "last", "mean", "max")))
