"""The obvious server: a FastAPI handler that pads its inputs and calls torch once for each request.

It serves the text models of `examples/train_text.py` from the same folders as seqserve, with the same answers, as fast as this design
allows: no gradients, one torch thread so that handlers do not compete for cores, no masking or packing of a single row.
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
from text_encoders import LSTMEncoder, SRUEncoder, TextCNNEncoder, TextEncoder
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence


class Question(BaseModel):
    model: str
    inputs: list[str]
    version: str = "1"


class PlainOutput(BaseModel):
    label: str
    score: float
    scores: dict[str, float]


class PlainAnswer(BaseModel):
    model: str
    version: str
    outputs: list[PlainOutput]


class PlainLSTM(LSTMEncoder):
    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        if len(lengths) > 1:
            return super().forward(embedded, lengths)
        steps: Tensor = self.lstm(embedded)[0]
        return steps.amax(dim=1)


class PlainCNN(TextCNNEncoder):
    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        if len(lengths) > 1:
            return super().forward(embedded, lengths)
        channels = pad(embedded.transpose(1, 2), (self.padding, self.padding))
        return torch.cat([convolution(channels).amax(dim=2) for convolution in self.convolutions], dim=1).relu()


ENCODERS: dict[str, type[LSTMEncoder | SRUEncoder | TextCNNEncoder]] = {
    "lstm": PlainLSTM,
    "sru": SRUEncoder,
    "text_cnn": PlainCNN,
}


class PlainClassifier(nn.Module):
    """Maps texts to probabilities with the weights of a model folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        weights = load_file(folder / "weights.safetensors")
        self.model = tomllib.loads((folder / "model.toml").read_text())
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        layer = self.model["layers"][1]
        self.embedding = nn.Embedding(*weights["layers.0.weight"].shape)
        self.encoder: TextEncoder = ENCODERS[layer["kind"]](
            self.embedding.embedding_dim, layer.get("hidden") or layer["filters"]
        )
        self.head = nn.Linear(*weights["head.weight"].shape)
        self.requires_grad_(False)
        self.embedding.weight.copy_(weights["layers.0.weight"])
        for name, view in self.encoder.tensors().items():
            view.copy_(weights[f"layers.1.{name}"])
        self.head.weight.copy_(weights["head.weight"].T)
        self.head.bias.copy_(weights["head.bias"])

    def forward(self, texts: list[str]) -> Tensor:
        """Return probabilities (texts, labels)."""
        ids = [torch.tensor(self.tokenizer.encode(text).ids) for text in texts]
        lengths = torch.tensor([len(each) for each in ids])
        encoded = self.encoder(self.embedding(pad_sequence(ids, batch_first=True)), lengths)
        return torch.softmax(self.head(encoded), dim=-1)


def build(folder: Path) -> FastAPI:
    app, classifier = FastAPI(), PlainClassifier(folder).eval()
    name, version, labels = classifier.model["name"], folder.name, classifier.model["head"]["labels"]

    @app.post("/infer")
    def infer(question: Question) -> PlainAnswer:
        with torch.inference_mode():
            rows = classifier(question.inputs).tolist()
        outputs = []
        for row in rows:
            scores = dict(zip(labels, row, strict=True))
            best = max(scores, key=scores.__getitem__)
            outputs.append(PlainOutput(label=best, score=scores[best], scores=scores))
        return PlainAnswer(model=name, version=version, outputs=outputs)

    @app.get("/readyz")
    def readyz() -> bool:
        return True

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of a model version, such as models/question-type-lstm/1")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    uvicorn.run(build(options.folder), port=options.port, access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
