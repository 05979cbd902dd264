"""Modules of torch that the tests export with torch.onnx.export. The new exporter takes seconds for each, so it exports fewer."""

from __future__ import annotations

from tests.importers.torch_models import ACTIVATED, OTHERS, PACKED, PROJECTED, RECURRENT

BY_OLD_EXPORTER = [*RECURRENT, *PACKED, *OTHERS, *ACTIVATED]
_NEW = (*("nn.LSTM: two layers, bidirectional", "nn.Conv1d: TCN with nn.utils.weight_norm", "nn.Conv2d: text CNN"),)
BY_NEW_EXPORTER = [sample for sample in BY_OLD_EXPORTER if str(sample) in _NEW]
NOT_EXPRESSIBLE = [(PROJECTED[0], "initial state has the shape"), (RECURRENT[-1], "takes the step 1")]
