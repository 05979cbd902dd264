"""Modules of torch that the tests export with torch.onnx.export. The new exporter takes seconds for each, so it exports fewer."""

from __future__ import annotations

from tests.importers.table import Line
from tests.importers.torch_models import ACTIVATED, OTHERS, PACKED, PROJECTED, RECURRENT, REFUSED, Sample

BY_OLD_EXPORTER = [*RECURRENT, *PACKED, *OTHERS, *ACTIVATED]
_NEW = (*("nn.LSTM: two layers, bidirectional", "nn.Conv1d: TCN with nn.utils.weight_norm", "nn.Conv2d: text CNN"),)
BY_NEW_EXPORTER = [sample for sample in BY_OLD_EXPORTER if str(sample) in _NEW]
NOT_EXPRESSIBLE = [(PROJECTED[0], "initial state has the shape"), (RECURRENT[-1], "takes the step 1")]


def _lines(samples: list[Sample], exporter: str, refused: str = "") -> list[Line]:
    return [Line(f"torch.onnx.export({exporter}), {sample.part}", sample.option, refused) for sample in samples]


TABLE = [
    *_lines(BY_OLD_EXPORTER, "dynamo=False"),
    *_lines(REFUSED, "dynamo=False", "no activation of model.toml computes"),
    *_lines(BY_NEW_EXPORTER, "dynamo=True"),
    *(line for sample, refused in NOT_EXPRESSIBLE for line in _lines([sample], "dynamo=True", refused)),
]
