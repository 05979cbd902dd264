"""Texts to token ids, by the `tokenizer.json` of a model folder (Hugging Face tokenizers)."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as HuggingFaceTokenizer

from service.errors import InvalidInput, ModelError
from service.modeling.spec import MODEL, TOKENIZER, ModelSpec, verified


class Tokenizer:
    """One model's tokenizer."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def read(cls, folder: Path, spec: ModelSpec) -> Tokenizer:
        """Raises ModelError when the file is not the one that the model was written with."""
        file = folder / TOKENIZER
        try:
            tokenizer = HuggingFaceTokenizer.from_buffer(verified(file, spec))
        except ModelError:
            raise
        except Exception as fault:  # the library raises plain Exception for every kind of broken file
            raise ModelError(f"{file}: {fault}") from fault
        tokens = 1 + max(tokenizer.get_vocab().values(), default=-1)
        if tokens != spec.input.vocabulary:
            raise ModelError(f"{file} has token ids below {tokens} and input.vocabulary in {MODEL} is {spec.input.vocabulary}")
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
