"""Texts to token ids, by the `tokenizer.json` of a model folder (Hugging Face tokenizers)."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tokenizers import Tokenizer as HuggingFaceTokenizer

from service.errors import InvalidInput, ModelError
from service.zoo.spec import MODEL, TOKENIZER, ModelSpec


class Tokenizer:
    """One model's tokenizer."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def read(cls, folder: Path, spec: ModelSpec) -> Tokenizer:
        """Raises ModelError when the file is not the one that the model was written with."""
        file = folder / TOKENIZER
        try:
            data = file.read_bytes()
            tokenizer = HuggingFaceTokenizer.from_buffer(data)
        except OSError as fault:
            raise ModelError(f"{file} cannot be read: {fault.strerror}; a model over text needs it") from fault
        except Exception as fault:  # the library raises plain Exception for every kind of broken file
            raise ModelError(f"{file}: {fault}") from fault
        if hashlib.sha256(data).hexdigest() != spec.sha256.get(TOKENIZER):
            raise ModelError(f"{file} does not have the digest in {MODEL}: the copy is broken, or the digest was not updated")
        if tokenizer.get_vocab_size() != spec.input.vocabulary:
            raise ModelError(
                f"{file} has {tokenizer.get_vocab_size()} tokens and input.vocabulary in {MODEL} is {spec.input.vocabulary}"
            )
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(tokenizer)

    def ids(self, text: str, field: str) -> list[int]:
        """The token ids of one text; raises InvalidInput for a text that cannot be tokenised."""
        try:
            ids: list[int] = self._tokenizer.encode(text).ids
        except BaseException as fault:  # a panic in the library is no Exception
            if isinstance(fault, KeyboardInterrupt | SystemExit):
                raise
            raise InvalidInput(f"{field} cannot be tokenised: {fault}", field=field) from fault
        return ids
