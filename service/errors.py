"""Every way in which the service says no, and the one table of its codes. Nothing here knows a transport.

ServiceError
├── InvalidRequest        the body as a whole cannot be read
├── InvalidInput          one field has the wrong type, shape or value
├── UnknownModel          no such model or version is served
├── UnknownRoute          nothing is served at this path
├── UnknownSession        no such session is open
├── SessionExpired        the session was idle for too long, and its state is gone
├── SessionLost           the session's state was lost with its engine
├── SessionConflict       the session is not where, or not what, the caller takes it to be
├── TooManySessions       as many sessions are open as may be
├── MethodNotAllowed      the path exists, the method does not
├── TooLarge              a body, a text or a sequence is over its limit
├── UnsupportedMedia      a content type or encoding that is not read here
├── Unsupported           the protocol has it, and this service does not
├── Overloaded            the queue or the channel is full
├── Unavailable           the service is not ready: loading
├── OutOfMemory           the device has no memory for this request
├── NoRoom                there is no memory for a model beside those that are served
├── InvalidModel          a model's folder is not what it has to be
├── EngineLost            the engine process ended and the request could not be run again in time
├── DeadlineExceeded      the caller's deadline passed first
└── InferenceFailed       the model raised: a bug of ours or of the model
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple


class ServiceError(Exception):
    """Something a caller is told. The message names the field or the knob, both values and the way out.

    `field` names the part of the request at fault (``inputs[3]``), `retry_after` the seconds after which a retry makes sense.
    """

    code: ClassVar[str]

    def __init__(self, message: str, *, field: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after


class InvalidRequest(ServiceError):
    code = "invalid_request"


class InvalidInput(ServiceError):
    code = "invalid_input"


class UnknownModel(ServiceError):
    code = "unknown_model"


class UnknownRoute(ServiceError):
    code = "unknown_route"


class UnknownSession(ServiceError):
    code = "unknown_session"


class SessionExpired(ServiceError):
    code = "session_expired"


class SessionLost(ServiceError):
    code = "session_lost"


class SessionConflict(ServiceError):
    """elsewhere: name, version and generation of the model that the session is of, where the caller left open which of its versions he
    means: then a front asks again with that one, and he does not hear of it."""

    code = "session_conflict"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after: int | None = None,
        elsewhere: tuple[str, str, int] | None = None,
    ) -> None:
        super().__init__(message, field=field, retry_after=retry_after)
        self.elsewhere = elsewhere


class TooManySessions(ServiceError):
    code = "too_many_sessions"


class MethodNotAllowed(ServiceError):
    code = "method_not_allowed"


class TooLarge(ServiceError):
    code = "too_large"


class UnsupportedMedia(ServiceError):
    code = "unsupported_media"


class Unsupported(ServiceError):
    code = "unsupported"


class Overloaded(ServiceError):
    code = "overloaded"


class Unavailable(ServiceError):
    code = "unavailable"


class OutOfMemory(ServiceError):
    code = "out_of_memory"


class NoRoom(ServiceError):
    code = "no_room"


class InvalidModel(ServiceError):
    code = "invalid_model"


class EngineLost(ServiceError):
    code = "engine_lost"


class DeadlineExceeded(ServiceError):
    code = "deadline_exceeded"


class InferenceFailed(ServiceError):
    code = "inference_failed"


class Status(NamedTuple):
    """The codes of one error on each transport."""

    http: int
    grpc: str


STATUS: dict[type[ServiceError], Status] = {
    InvalidRequest: Status(400, "INVALID_ARGUMENT"),
    InvalidInput: Status(400, "INVALID_ARGUMENT"),
    UnknownModel: Status(404, "NOT_FOUND"),
    UnknownRoute: Status(404, "UNIMPLEMENTED"),
    UnknownSession: Status(404, "NOT_FOUND"),
    SessionExpired: Status(404, "NOT_FOUND"),
    SessionLost: Status(409, "ABORTED"),
    SessionConflict: Status(409, "ABORTED"),
    TooManySessions: Status(429, "RESOURCE_EXHAUSTED"),
    MethodNotAllowed: Status(405, "UNIMPLEMENTED"),
    TooLarge: Status(413, "RESOURCE_EXHAUSTED"),
    UnsupportedMedia: Status(415, "UNIMPLEMENTED"),
    Unsupported: Status(501, "UNIMPLEMENTED"),
    Overloaded: Status(503, "UNAVAILABLE"),
    Unavailable: Status(503, "UNAVAILABLE"),
    OutOfMemory: Status(503, "UNAVAILABLE"),
    NoRoom: Status(507, "RESOURCE_EXHAUSTED"),
    InvalidModel: Status(400, "INVALID_ARGUMENT"),
    EngineLost: Status(503, "UNAVAILABLE"),
    DeadlineExceeded: Status(504, "DEADLINE_EXCEEDED"),
    InferenceFailed: Status(500, "INTERNAL"),
}

BY_CODE = {kind.code: kind for kind in STATUS}


class StartError(Exception):
    """The service cannot start as it is configured; the message says what to change."""


class SettingsError(StartError):
    """A setting is unknown or has a value that cannot be."""


class ModelError(StartError):
    """A model folder is not what `zoo.spec` asks for."""
