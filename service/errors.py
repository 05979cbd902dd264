"""Every error that the service returns to a client, and the table of their status codes. No class here knows a transport.

ServiceError
├── InvalidRequest        the body as a whole cannot be read
├── InvalidInput          one field has the wrong type, shape or value
├── Unauthorized          the request has no valid key
├── Forbidden             the caller may not do this
├── UnknownModel          no such model or version is served
├── UnknownRoute          nothing is served at this path
├── UnknownSession        no such session is open
├── SessionExpired        the session was idle for too long, and its state is gone
├── SessionLost           the session's state was lost with its engine
├── SessionConflict       the session is not in the state that the request assumes
├── SessionUnreachable    the replica that may hold the session does not answer
├── TooManySessions       the limit of open sessions is reached
├── QuotaExceeded         a key uses more than its quota
├── MethodNotAllowed      the path exists, the method does not
├── TooLarge              a body, a text or a sequence exceeds its limit
├── HeadersTooLarge       the head of a request exceeds its limits
├── RequestTimeout        the client sends its request too slowly
├── UnsupportedMedia      a content type or encoding that the service does not read
├── Unsupported           the protocol has this feature and the service does not
├── Overloaded            the queue or the channel is full
├── Unavailable           the service is not ready: models are loading
├── OutOfMemory           the device has no memory for this request
├── NoRoom                there is no memory for another model
├── InvalidModel          a model's folder is not valid
├── EngineLost            the engine process ended and the request could not be run again in time
├── DeadlineExceeded      the request's deadline passed first
└── InferenceFailed       the model or the service raised an exception: a bug of either
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple


class ServiceError(Exception):
    """An error that a client receives. Its message names the field or the setting, both values and what to do.

    `field` names the wrong part of the request (``inputs[3]``). `retry_after` is the number of seconds after which a retry makes sense.
    `steps` is how many steps the session has that the request names, where the client needs to know. `final` is true if the client should
    not send the request again, although others may.
    """

    code: ClassVar[str]
    final = False

    def __init__(
        self, message: str, *, field: str | None = None, retry_after: int | None = None, steps: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.steps = steps


class InvalidRequest(ServiceError):
    code = "invalid_request"


class InvalidInput(ServiceError):
    code = "invalid_input"


class Unauthorized(ServiceError):
    code = "unauthorized"


class Forbidden(ServiceError):
    code = "forbidden"


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
    """A session that is not in the state that the request assumes.

    `elsewhere` is the name, version and generation of the session's model, if the request names no version. A frontend then sends the
    request again with that version, and the client never sees this error.
    """

    code = "session_conflict"
    elsewhere: tuple[str, str, int] | None = None


class SessionUnreachable(ServiceError):
    code = "session_unreachable"


class TooManySessions(ServiceError):
    code = "too_many_sessions"


class QuotaExceeded(ServiceError):
    code = "quota_exceeded"


class MethodNotAllowed(ServiceError):
    code = "method_not_allowed"


class TooLarge(ServiceError):
    code = "too_large"


class HeadersTooLarge(ServiceError):
    code = "headers_too_large"


class RequestTimeout(ServiceError):
    code = "request_timeout"


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
    """A failure that is not the client's. `in_frontend` is true if the frontend itself failed, not the model."""

    code = "inference_failed"
    in_frontend = False


SERVICE_FAILED = "the service failed on this request: see its log"
"""Message of an InferenceFailed for an unexpected exception, which only the log names."""


class StatusCodes(NamedTuple):
    """The status codes of one error, per transport."""

    http: int
    grpc: str


STATUS: dict[type[ServiceError], StatusCodes] = {
    InvalidRequest: StatusCodes(400, "INVALID_ARGUMENT"),
    InvalidInput: StatusCodes(400, "INVALID_ARGUMENT"),
    Unauthorized: StatusCodes(401, "UNAUTHENTICATED"),
    Forbidden: StatusCodes(403, "PERMISSION_DENIED"),
    UnknownModel: StatusCodes(404, "NOT_FOUND"),
    UnknownRoute: StatusCodes(404, "UNIMPLEMENTED"),
    UnknownSession: StatusCodes(404, "NOT_FOUND"),
    SessionExpired: StatusCodes(404, "NOT_FOUND"),
    SessionLost: StatusCodes(409, "ABORTED"),
    SessionConflict: StatusCodes(409, "ABORTED"),
    SessionUnreachable: StatusCodes(503, "UNAVAILABLE"),
    TooManySessions: StatusCodes(429, "RESOURCE_EXHAUSTED"),
    QuotaExceeded: StatusCodes(429, "RESOURCE_EXHAUSTED"),
    MethodNotAllowed: StatusCodes(405, "UNIMPLEMENTED"),
    TooLarge: StatusCodes(413, "RESOURCE_EXHAUSTED"),
    HeadersTooLarge: StatusCodes(431, "RESOURCE_EXHAUSTED"),
    RequestTimeout: StatusCodes(408, "DEADLINE_EXCEEDED"),
    UnsupportedMedia: StatusCodes(415, "UNIMPLEMENTED"),
    Unsupported: StatusCodes(501, "UNIMPLEMENTED"),
    Overloaded: StatusCodes(503, "UNAVAILABLE"),
    Unavailable: StatusCodes(503, "UNAVAILABLE"),
    OutOfMemory: StatusCodes(503, "UNAVAILABLE"),
    NoRoom: StatusCodes(507, "RESOURCE_EXHAUSTED"),
    InvalidModel: StatusCodes(400, "INVALID_ARGUMENT"),
    EngineLost: StatusCodes(503, "UNAVAILABLE"),
    DeadlineExceeded: StatusCodes(504, "DEADLINE_EXCEEDED"),
    InferenceFailed: StatusCodes(500, "INTERNAL"),
}

BY_CODE = {kind.code: kind for kind in STATUS}


class StartError(Exception):
    """The service cannot start with its configuration. The message says what to change."""


class SettingsError(StartError):
    """A setting is unknown or has an impossible value."""


class ModelError(StartError):
    """A model folder is not what `service.modeling.spec` requires."""
