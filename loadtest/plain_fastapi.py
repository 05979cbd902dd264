"""The server that is written first: a FastAPI handler that pads its inputs and calls torch, once for each request.

It serves the text models that `examples/train_text.py` makes, from the same folders and with the same answers as seqserve, as fast
as this way allows: no gradients, one torch thread so that handlers do not fight for cores, nothing masked or packed for a lone row.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from safetensors.torch import load_file
from text_encoders import LSTM, SRU, Encoder, TextCNN
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence


class Question(BaseModel):
    model: str
    inputs: list[str]
    version: str = "1"


class Output(BaseModel):
    label: str
    score: float
    scores: dict[str, float]


class Answer(BaseModel):
    model: str
    version: str
    outputs: list[Output]


class PlainLSTM(LSTM):
    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        if len(lengths) > 1:
            return super().forward(embedded, lengths)
        steps: Tensor = self.lstm(embedded)[0]
        return steps.amax(dim=1)


class PlainCNN(TextCNN):
    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        if len(lengths) > 1:
            return super().forward(embedded, lengths)
        channels = pad(embedded.transpose(1, 2), (self.padding, self.padding))
        return torch.cat([convolution(channels).amax(dim=2) for convolution in self.convolutions], dim=1).relu()


ENCODERS: dict[str, type[LSTM | SRU | TextCNN]] = {"lstm": PlainLSTM, "sru": SRU, "text_cnn": PlainCNN}


class Classifier(nn.Module):
    """Texts to probabilities, with the weights of a model folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        weights = load_file(folder / "weights.safetensors")
        self.model = tomllib.loads((folder / "model.toml").read_text())
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        layer = self.model["layers"][1]
        self.embedding = nn.Embedding(*weights["layers.0.weight"].shape)
        self.encoder: Encoder = ENCODERS[layer["kind"]](self.embedding.embedding_dim, layer.get("hidden") or layer["filters"])
        self.head = nn.Linear(*weights["head.weight"].shape)
        self.requires_grad_(False)
        self.embedding.weight.copy_(weights["layers.0.weight"])
        for name, view in self.encoder.tensors().items():
            view.copy_(weights[f"layers.1.{name}"])
        self.head.weight.copy_(weights["head.weight"].T)
        self.head.bias.copy_(weights["head.bias"])

    def forward(self, texts: list[str]) -> Tensor:
        """(texts, labels)"""
        ids = [torch.tensor(self.tokenizer.encode(text).ids) for text in texts]
        lengths = torch.tensor([len(one) for one in ids])
        encoded = self.encoder(self.embedding(pad_sequence(ids, batch_first=True)), lengths)
        return torch.softmax(self.head(encoded), dim=-1)


def build(folder: Path) -> FastAPI:
    app, classifier = FastAPI(), Classifier(folder).eval()
    name, version, labels = classifier.model["name"], folder.name, classifier.model["head"]["labels"]

    @app.post("/infer")
    def infer(question: Question) -> Answer:
        with torch.inference_mode():
            rows = classifier(question.inputs).tolist()
        outputs = []
        for row in rows:
            scores = dict(zip(labels, row, strict=True))
            best = max(scores, key=scores.__getitem__)
            outputs.append(Output(label=best, score=scores[best], scores=scores))
        return Answer(model=name, version=version, outputs=outputs)

    @app.get("/readyz")
    def readyz() -> bool:
        return True

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a model's version, such as models/question-type-lstm/1")
    parser.add_argument("--port", type=int, required=True)
    said = parser.parse_args()
    torch.set_num_threads(1)
    uvicorn.run(build(said.folder), port=said.port, access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
