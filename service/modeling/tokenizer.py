"""Text to token ids with the `tokenizer.json` of a model folder (Hugging Face tokenizers)."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from service.errors import InvalidInput, ModelError
from service.modeling.spec import MAX_TOKENIZER_BYTES, MODEL, TOKENIZER, ModelSpec, read_verified
from service.modeling.spec.files import read_file
from service.modeling.tokenizer_file import check_within_limits, parse
from service.modeling.word_table import build_word_table


class Tokenizer:
    """The tokenizer of one model."""

    def __init__(self, definition: bytes) -> None:
        """definition: the content of tokenizer.json, which a decoder process gets. The library's exceptions pass through."""
        self.definition = definition
        self._tokenizer = tokenizer = parse(definition)
        self._word_table = build_word_table(json.loads(tokenizer.to_str()), lambda text: list(tokenizer.encode(text).ids))

    @classmethod
    def checked(cls, file: Path, definition: bytes | None = None) -> Tokenizer:
        """Return the tokenizer in a file; raises ModelError if it cannot be read, or not within limits. definition: its known content."""
        try:
            definition = read_file(file, limit=MAX_TOKENIZER_BYTES) if definition is None else definition
            check_within_limits(definition)
            return cls(definition)
        except BaseException as error:  # the library raises plain Exception for every kind of broken file, and panics at some
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ModelError(f"{file}: {error}") from error

    @classmethod
    def read(cls, folder: Path, spec: ModelSpec) -> Tokenizer:
        """Read the tokenizer of a version folder; raises ModelError if the file or its vocabulary does not match `spec`."""
        file = folder / TOKENIZER
        tokenizer = cls.checked(file, read_verified(file, spec))
        tokens = tokenizer.vocabulary
        if tokens > (spec.input.vocabulary or 0):
            raise ModelError(
                f"{file} has ids up to {tokens - 1} and input.vocabulary in {MODEL} is {spec.input.vocabulary}: raise it to {tokens}, "
                "with as many rows in the embedding, or use the tokenizer of the model"
            )
        return tokenizer

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary that covers all ids."""
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def packed_ids(self, text: str, field: str) -> bytes:
        """Return the token ids of a text as little-endian int32; raises InvalidInput if it cannot be tokenised.

        field: the request field that has the text.
        """
        table = self._word_table
        if table is not None and table.covers(text):
            return table.packed_ids(text)
        ids = self._encode(text, field)
        return struct.pack(f"<{len(ids)}i", *ids)

    def tokens(self, text: str, field: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the id of each token of a text, and the characters that it covers, from a first to before a last; raises InvalidInput.

        A token that the tokenizer adds, such as [CLS], covers no characters.
        """
        try:
            encoding = self._tokenizer.encode(text)
        except BaseException as error:
            raise _refusal(error, field) from error
        return encoding.ids, encoding.offsets

    def _encode(self, text: str, field: str) -> list[int]:
        try:
            # A batch of one costs less than `encode`: it computes no offsets. Larger batches gain less than collecting them costs.
            ids: list[int] = self._tokenizer.encode_batch_fast([text])[0].ids
        except BaseException as error:  # a panic in the library is not an Exception
            raise _refusal(error, field) from error
        return ids

    def text_of(self, id: int) -> str:
        """Return a token of the vocabulary as text, empty for an id that has none."""
        piece: str | None = self._tokenizer.id_to_token(id)
        return "" if piece is None else self._tokenizer.decode([id], skip_special_tokens=False) or piece


def _refusal(error: BaseException, field: str) -> BaseException:
    """Return the InvalidInput for an exception of the library, or the exception itself if it ends the process."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    return InvalidInput(f"{field} cannot be tokenised: {error}", field=field)
