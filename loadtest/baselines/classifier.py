"""The text models of the comparison in plain PyTorch, as fast as eager execution allows: no gradients, one thread, one padded batch."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

MODEL_VARIABLE = "BASELINE_MODEL"
CONSTANT = (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125)
Scores = list[list[float]]


def load() -> Callable[[Sequence[str]], Scores]:
    """Return a function from texts to one row of scores each: the model in MODEL_VARIABLE, or a constant."""
    folder = os.environ.get(MODEL_VARIABLE)
    return TextClassifier(Path(folder)).scores if folder else lambda texts: [list(CONSTANT) for _ in texts]


class TextClassifier(nn.Module):
    """Maps texts to probabilities with the weights of a model version: an embedding, then one LSTM or the convolutions of Kim (2014)."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.set_num_threads(1)
        model = tomllib.loads((folder / "model.toml").read_text())
        weights = {name: values.float() for name, values in load_file(folder / "weights.safetensors").items()}
        self.labels: list[str] = model["head"]["labels"]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        vectors = weights["layers.0.weight"]
        self._embedding = nn.Embedding(vectors.shape[0], vectors.shape[1], _weight=vectors)
        layer, prefix = model["layers"][1], "layers.1."
        parameters = {name.removeprefix(prefix): values for name, values in weights.items() if name.startswith(prefix)}
        self._encoder = _ENCODERS[layer["kind"]](layer, parameters)
        self._head = nn.Linear(*weights["head.weight"].shape)
        self.requires_grad_(False)
        self._head.weight.copy_(weights["head.weight"].T)
        self._head.bias.copy_(weights["head.bias"])
        self.eval()

    def scores(self, texts: Sequence[str]) -> Scores:
        """Return a row of probabilities for each text."""
        with torch.inference_mode():
            rows: Scores = self(texts).tolist()
            return rows

    def forward(self, texts: Sequence[str]) -> Tensor:
        ids = [torch.tensor(encoding.ids) for encoding in self._tokenizer.encode_batch_fast(list(texts))]
        lengths = torch.tensor([len(row) for row in ids])
        encoded = self._encoder(self._embedding(pad_sequence(ids, batch_first=True)), lengths)
        return torch.softmax(self._head(encoded), dim=-1)


class LastStep(nn.Module):
    """An LSTM in one direction: padding comes after the last step, so it changes nothing."""

    def __init__(self, layer: dict[str, Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        inputs = weights["0.forward.input"]
        self._lstm = nn.LSTM(inputs.shape[0], layer["hidden"], batch_first=True).requires_grad_(False)
        self._lstm.get_parameter("weight_ih_l0").copy_(inputs.T)
        self._lstm.get_parameter("weight_hh_l0").copy_(weights["0.forward.recurrent"].T)
        self._lstm.get_parameter("bias_ih_l0").copy_(weights["0.forward.bias"])
        self._lstm.get_parameter("bias_hh_l0").zero_()  # the model folder has one bias, and PyTorch two

    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        steps: Tensor = self._lstm(embedded)[0]
        return steps[:, -1] if len(lengths) == 1 else steps[torch.arange(len(lengths)), lengths - 1]


class MaximumOverTime(nn.Module):
    """Convolutions of several widths with ReLU, each pooled by its maximum. Masks are needed only for rows of different lengths."""

    def __init__(self, layer: dict[str, Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._padding: int = layer["padding"]
        self._convolutions = nn.ModuleList()
        for width in layer["widths"]:
            filters = weights[f"{width}.filters"].permute(2, 1, 0)
            convolution = nn.Conv1d(filters.shape[1], filters.shape[0], width).requires_grad_(False)
            convolution.weight.copy_(filters)
            convolution.bias.copy_(weights[f"{width}.bias"])  # type: ignore[union-attr] # it has a bias
            self._convolutions.append(convolution)

    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        if len(lengths) > 1:
            embedded = embedded.masked_fill(_beyond(lengths, embedded.shape[1])[:, :, None], 0.0)
        channels = pad(embedded.transpose(1, 2), (self._padding, self._padding))
        return torch.cat([self._maxima(convolution, channels, lengths) for convolution in self._convolutions], dim=1).relu()

    def _maxima(self, convolution: nn.Module, channels: Tensor, lengths: Tensor) -> Tensor:
        steps: Tensor = convolution(channels)
        if len(lengths) > 1:
            width = channels.shape[2] - steps.shape[2] + 1
            beyond = _beyond(lengths + 2 * self._padding - width + 1, steps.shape[2])
            steps = steps.masked_fill(beyond[:, None], -torch.inf)
        return steps.amax(dim=2)


_ENCODERS: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], nn.Module]] = {"lstm": LastStep, "text_cnn": MaximumOverTime}


def _beyond(lengths: Tensor, steps: int) -> Tensor:
    """Return (rows, steps), True for steps beyond the length of their row."""
    return torch.arange(steps) >= lengths[:, None]
