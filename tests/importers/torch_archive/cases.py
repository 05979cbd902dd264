"""Archives of torch that import or are refused."""

from __future__ import annotations

from tests.importers.torch_models import ACTIVATED, OTHERS, PACKED, PROJECTED, RECURRENT, Sample

TRACED = [*RECURRENT, *PACKED, *PROJECTED, *OTHERS, *ACTIVATED]
_EXPORTED = (
    *("nn.LSTM: two layers, bidirectional", "nn.LSTM: learned initial states", "nn.LSTM: proj_size=2", "nn.GRU: tags"),
    *("nn.GRU: batch_first=False", 'nn.RNN: nonlinearity="relu"', "nn.Conv1d: text CNN", "nn.Conv2d: text CNN"),
    *("nn.Conv1d: TCN with parametrizations.weight_norm", "nn.Conv1d: causal, functional.glu"),
    *("nn.GRU: attention pool by sum", "nn.Embedding, nn.Linear: ELU(alpha=0.5)"),
)
EXPORTED = [each for each in [*RECURRENT, *PROJECTED, *OTHERS, *ACTIVATED] if str(each) in _EXPORTED]
"""torch.export takes long, so that it exports fewer."""
BY_NUMBERS = "it works on the axis of batch"


def refused_activation(sample: Sample) -> str:
    """Return the words of the refusal of a module with an activation that no layer has."""
    return "operators of this name cannot be imported" if sample.option == "LogSigmoid()" else "no activation of model.toml"
