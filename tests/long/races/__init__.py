"""Two events race for one request, each at a named point of its way through a frontend and an engine.

Dispatcher, channel, worker and batcher are the real objects, in one thread and on a clock that the story moves. The device is a fake, and
the story decides when a batch ends. A story sends a marked request, which the events concern, and some more. In the end every request must
have exactly one outcome, and hold no resource any more.
"""

from __future__ import annotations

from enum import StrEnum

POINTS = (
    *("parsed", "sent", "received", "queued", "launching", "launched"),
    *("ended", "answering", "answered", "returned", "replying", "replied"),
)
"""The way of a request: it is about to be sent to the engine, was written to the channel, was read, and is in the queue; its batch is about
to start, has started, and has ended; its answer is about to be written, was written, and has arrived; its client is about to get it, and
has got it."""
FRONTEND_POINTS = ("parsed", "sent", "returned", "replying", "replied")


class Event(StrEnum):
    """The events that may end a request."""

    CANCEL = "cancel"
    DEADLINE = "deadline"
    ANSWER = "answer"
    ERROR = "error"
    LOST = "lost"
    UNLOAD = "unload"


CODES = {
    Event.CANCEL: {"cancelled"},
    Event.DEADLINE: {"deadline_exceeded"},
    Event.ANSWER: {"ok"},
    Event.ERROR: {"inference_failed"},
    Event.LOST: {"engine_lost", "session_lost"},
    Event.UNLOAD: {"unknown_model", "session_lost"},
}
"""The outcomes that each event may have. Without an event a request is answered."""
