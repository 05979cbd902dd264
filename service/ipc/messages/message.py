"""The base of all messages, and the replies that any call may get."""

from __future__ import annotations

import msgspec

from service.errors import BY_CODE, InferenceFailed, ServiceError, SessionConflict
from service.ipc.messages.models import ModelKey


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of all messages."""


class Reply(Message, frozen=True):
    """Base of all replies to calls."""


class Done(Reply, frozen=True):
    """The call succeeded; its result, if any, is in the trailing bytes."""


class Refusal(Reply, frozen=True):
    """A ServiceError instead of a result."""

    code: str
    message: str
    field: str | None = None
    retry_after: int | None = None
    session_model: ModelKey | None = None
    """Model version of the session, when the request is for another version of that model."""
    steps: int | None = None

    @classmethod
    def of(cls, error: ServiceError) -> Refusal:
        elsewhere = error.elsewhere if isinstance(error, SessionConflict) else None
        key = elsewhere and ModelKey(*elsewhere)
        return cls(error.code, error.message, error.field, error.retry_after, key, error.steps)

    @property
    def error(self) -> ServiceError:
        """Return the error as the sender raised it."""
        kind = BY_CODE.get(self.code, InferenceFailed)
        error = kind(self.message, field=self.field, retry_after=self.retry_after, steps=self.steps)
        if isinstance(error, SessionConflict):
            error.elsewhere = self.session_model
        return error
