"""The compared models: a convolutional model that the service embeds, and an LSTM with random weights."""

from __future__ import annotations

import json
import shutil
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

from loadtest import servers, synthetic_models
from service.modeling.spec import TOKENIZER, SequenceInput
from service.modeling.spec.layers import EmbeddingLayer, LSTMLayer

CNN, LSTM = "question-type-cnn", "text-lstm"
MODELS = (CNN, LSTM)
VOCABULARY, WIDTH, HIDDEN = 8000, 100, 256
LABELS = ("first", "second", "third", "fourth", "fifth", "sixth")
LSTM_SCALE = 0.2
"""Scale of the LSTM's weights: scores of different texts differ by far more than a tolerance."""


def write(root: Path) -> None:
    """Fill `root` with both models."""
    shutil.copytree(servers.MODELS / CNN, root / CNN)  # a service follows no link out of its folder
    text = SequenceInput(kind="text", max_steps=512, vocabulary=VOCABULARY)
    layers = EmbeddingLayer(kind="embedding", width=WIDTH), LSTMLayer(kind="lstm", hidden=HIDDEN)
    tokenizer = _tokenizer(servers.MODELS / CNN / "1" / TOKENIZER)
    synthetic_models.write(root, LSTM, text, *layers, precision="float32", scale=LSTM_SCALE, labels=LABELS, tokenizer=tokenizer)


def _tokenizer(file: Path) -> str:
    """Return a tokenizer with invented words beyond the vocabulary of `file`."""
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    invented = ("".join(letters) for letters in product(ascii_lowercase, repeat=4))
    unused = (word for word in invented if word not in vocabulary)
    for word in islice(unused, VOCABULARY - len(vocabulary)):
        vocabulary[word] = len(vocabulary)
    return json.dumps(tokenizer)
