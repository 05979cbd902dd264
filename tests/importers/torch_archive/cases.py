"""The table of what imports from archives of torch, and what is refused."""

from __future__ import annotations

from tests.importers.table import Line
from tests.importers.torch_archive.scripted import REFUSED as REFUSED_SCRIPT
from tests.importers.torch_archive.scripted import SCRIPTED
from tests.importers.torch_models import ACTIVATED, OTHERS, PACKED, PROJECTED, RECURRENT, REFUSED, Sample

TRACED = [*RECURRENT, *PACKED, *PROJECTED, *OTHERS, *ACTIVATED]
_SLOW = (
    *("final state", "two layers, bidirectional", "batch_first=False", "learned initial states", "tags", "TCN", "text CNN"),
    *("attention pool by sum", "proj_size=2", 'nonlinearity="relu"', "causal, functional.glu", "GELU(approximate='none')"),
    *("TCN with parametrizations.weight_norm", "stride and groups", "ELU(alpha=0.5)"),
)
EXPORTED = [each for each in [*RECURRENT, *PROJECTED, *OTHERS, *ACTIVATED] if each.option in _SLOW and each.part != "nn.GRU"]
"""torch.export takes long, so that it exports fewer."""
BY_NUMBERS = "it works on the axis of batch"


def refused_activation(sample: Sample) -> str:
    """Return the words of the refusal of a module whose activation no layer has."""
    return "operators of this name cannot be imported" if sample.option == "LogSigmoid()" else "no activation of model.toml"


def _lines(samples: list[Sample], how: str, refused: str = "") -> list[Line]:
    return [Line(f"{how}, {sample.part}" if how else sample.part, sample.option, refused) for sample in samples]


TABLE = [
    *_lines(EXPORTED, "torch.export"),
    *_lines(TRACED, "torch.jit.trace"),
    *_lines(SCRIPTED, ""),
    *(Line(f"torch.jit.trace, {sample.part}", sample.option, refused_activation(sample)) for sample in REFUSED),
    *_lines([REFUSED_SCRIPT], "", BY_NUMBERS),
]
