"""A smaller vocabulary, for models over text whose tokens are whole words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service.compress.inputs import read_lines
from service.errors import InvalidInput, ModelError
from service.modeling.spec import ModelSpec
from service.modeling.tokenizer import Tokenizer


def prune_vocabulary(
    model: ModelSpec, arrays: Mapping[str, Tensor], tokenizer: Tokenizer | None, words: int, texts: Path
) -> tuple[ModelSpec, dict[str, Tensor], str]:
    """Return a model with the `words` most frequent words of some texts, its arrays, and its tokenizer.json.

    texts: a file with one text a line. Special tokens and the token for unknown words stay in addition; every other word becomes an
    unknown word. Raises ModelError for a model with tokens other than whole words, and for a model that answers with tokens.
    """
    if tokenizer is None:
        raise ModelError(
            f"--vocabulary needs a model for texts, and {model.name} takes {model.input.kind}: leave --vocabulary out"
        )
    if model.head.kind == "next":
        raise ModelError(f"--vocabulary cannot be used for {model.name}: its answers are tokens of the vocabulary")
    definition = json.loads(tokenizer.definition)
    vocabulary = _word_ids(definition, model)
    kept = _kept_ids(definition, vocabulary, _counts(tokenizer, texts), words)
    if len(kept) >= len(arrays["layers.0.weight"]):
        raise ModelError(
            f"--vocabulary is {words} and {model.name} has {len(arrays['layers.0.weight'])} tokens: choose a lower number"
        )
    reduced = model.model_copy(update={"input": model.input.model_copy(update={"vocabulary": len(kept)})})
    table = arrays["layers.0.weight"].index_select(0, torch.tensor(kept))
    return reduced, dict(arrays) | {"layers.0.weight": table}, json.dumps(_renumbered(definition, kept), ensure_ascii=False)


def _word_ids(definition: Mapping[str, Any], model: ModelSpec) -> dict[str, int]:
    """Return the id of each word; raises ModelError for a tokenizer of another kind."""
    kind, after = definition["model"].get("type"), definition.get("post_processor")
    if kind != "WordLevel" or after is not None:
        what = f"of kind {kind}" if kind != "WordLevel" else "with a post-processor"
        raise ModelError(f"--vocabulary needs a tokenizer of whole words (WordLevel), and that of {model.name} is one {what}")
    words: dict[str, int] = definition["model"]["vocab"]
    return words


def _counts(tokenizer: Tokenizer, texts: Path) -> Counter[int]:
    """Return how often each token is in the texts."""
    counts: Counter[int] = Counter()
    for number, text in enumerate(read_lines(texts), start=1):
        try:
            counts.update(np.frombuffer(tokenizer.packed_ids(text, f"{texts} line {number}"), dtype="<i4").tolist())
        except InvalidInput as error:
            raise ModelError(error.message) from error
    return counts


def _kept_ids(definition: Mapping[str, Any], words: Mapping[str, int], counts: Counter[int], most: int) -> Sequence[int]:
    """Return the ids that stay, in ascending order. Of equally frequent words, those with lower ids stay."""
    always = {token["id"] for token in definition["added_tokens"]} | {words[definition["model"]["unk_token"]]}
    frequent = sorted(counts.keys() - always, key=lambda token: (-counts[token], token))
    return sorted(always | set(frequent[:most]))


def _renumbered(definition: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Return a tokenizer with the kept tokens, numbered from 0 in their order."""
    numbers = {old: new for new, old in enumerate(kept)}
    words = {word: numbers[old] for word, old in definition["model"]["vocab"].items() if old in numbers}
    added = [token | {"id": numbers[token["id"]]} for token in definition["added_tokens"]]
    return definition | {"added_tokens": added, "model": definition["model"] | {"vocab": words}}
