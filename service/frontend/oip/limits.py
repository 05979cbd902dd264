"""Limits of Open Inference Protocol requests: on the sizes that the event loop handles, and on the numbers of parts.

Each part costs time, however few bytes it has. No model has that many inputs, outputs or parameters: these limits only refuse requests
that would stall the frontend.
"""

from __future__ import annotations

from collections.abc import Sized

from service.errors import TooLarge
from service.settings import MAX_INPUTS_CEILING

MAX_LOOP_TENSOR_BYTES = 4 << 20
"""Larger tensors are checked in a thread: numpy does not hold the interpreter lock meanwhile."""
MAX_PARTS = 64
"""Most inputs, outputs, raw contents, or parameters of a request or a tensor."""
MAX_TEXTS = MAX_INPUTS_CEILING
"""Most elements of a BYTES tensor."""
MAX_CLASSES = 4096
"""Most entries of a classification, over all sequences of a request."""


def too_many(noun: str) -> TooLarge:
    """Return the error for too many parts of one kind. noun: the field that has them."""
    return TooLarge(f"the request has more than {MAX_PARTS} {noun}: send at most {MAX_PARTS}", field=noun)


def check_parts(**parts: Sized | None) -> None:
    """Raise TooLarge if a field has too many parts."""
    for noun, values in parts.items():
        if len(values or ()) > MAX_PARTS:
            raise too_many(noun)
