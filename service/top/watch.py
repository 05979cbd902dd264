"""Scrapes a service again and again, through failures and restarts of the service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError

from service.client_access import reason_of
from service.top.figures import SERIES, Levels, Rates
from service.top.scrape import Change, Scrape, printable


@dataclass(frozen=True, slots=True)
class Frame:
    """The content of the screen at one moment.

    levels: of the last scrape, None before it. rates: between the last two scrapes, None before them, and after a failure. error: why the
    service cannot be read now, empty if it can. age_seconds: of the levels. restarted_seconds: how long ago the service was restarted,
    None if it was not.
    """

    url: str
    levels: Levels | None = None
    rates: Rates | None = None
    error: str = ""
    age_seconds: float = 0.0
    restarted_seconds: float | None = None


class Watch:
    """Turns scrapes into frames.

    scrape: returns the metrics now. An OSError, HTTPException or ValueError means that the service does not answer with them.
    """

    def __init__(self, url: str, scrape: Callable[[], Scrape], clock: Callable[[], float]) -> None:
        self._url = url
        self._scrape = scrape
        self._clock = clock
        self._last: Scrape | None = None
        self._answered = False
        """Whether the last attempt succeeded."""
        self._restarted_at: float | None = None

    def frame(self) -> Frame:
        """Scrape the service, and return the next frame."""
        try:
            now = self._scrape()
        except (OSError, HTTPException, ValueError) as error:
            self._answered = False
            return self._frame(None, _reason(error))
        before, answered = self._last, self._answered
        self._last, self._answered = now, True
        if before is None:
            return self._frame(None)
        change = Change(before, now)
        if change.fell(SERIES.accepted) or change.fell(SERIES.channel_bytes):
            self._restarted_at = now.at
        return self._frame(Rates.of(change) if answered else None)

    def _frame(self, rates: Rates | None, error: str = "") -> Frame:
        moment = self._clock()
        return Frame(
            self._url,
            levels=None if self._last is None else Levels.of(self._last),
            rates=rates,
            error=error,
            age_seconds=0.0 if self._last is None else moment - self._last.at,
            restarted_seconds=None if self._restarted_at is None else moment - self._restarted_at,
        )


def _reason(error: Exception) -> str:
    """Return why a service cannot be read, without the types of Python."""
    if isinstance(error, HTTPError):
        return reason_of(error)
    cause = getattr(error, "reason", error)  # of a URLError
    return printable(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)
