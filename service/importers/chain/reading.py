"""Defines how a source is read, with what its operators found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from service.importers.chain.nodes import Input
from service.importers.draft import Draft

BATCH, STEPS = 101, 10007
"""Sizes of axes that a source leaves open. They are prime, so that no size of a weight is taken for them."""


@dataclass(slots=True)
class Reading:
    """How a source is read, with the notes and facts that its operators found.

    batch, steps: the sizes of the sequence input; fixed: whether the source takes this number of steps only; ids: the node of token ids;
    whole_pools: numbers of steps at which a pooling window covers them all; lengths: whether a layer takes the lengths of the sequences,
    or makes a mask; masks: whether the source replaces padding; progress: how many nodes were understood.
    """

    batch: int = BATCH
    steps: int = STEPS
    fixed: bool = False
    opset: int = 0
    ids: Input = field(default_factory=lambda: Input(1, is_ids=True))
    notes: list[str] = field(default_factory=list)
    whole_pools: list[int] = field(default_factory=list)
    lengths: bool = False
    masks: bool = False
    progress: int = 0

    def note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def complete(
        self,
        draft: Draft,
        weights: Iterable[str],
        source: str,
        outputs: Sequence[str] = (),
        *,
        marks: str = "lengths of sequences",
    ) -> None:
        """Add the unused tensors and the notes to a draft.

        source: the graph or the program, as notes name it; outputs: its outputs; marks: what tells padding from steps in such a source.
        """
        draft.unused = [name for name in weights if name not in draft.used]
        draft.notes += self.notes
        if self.fixed:
            draft.input["max_steps"] = self.steps
            draft.notes.append(
                f"the {source} takes sequences of {self.steps} steps only, and the model sequences of any length"
            )
        if not self.lengths:
            draft.notes.append(f"the {source} has no {marks}: if it was trained with padding, padded steps counted as steps")
        if len(outputs) > 1:
            draft.notes.append(f"of the outputs, only {outputs[0]} is imported, without {', '.join(outputs[1:])}")
