"""The header x-session-id, by which proxies choose a replica. It names the session of a request as its body, query or path does."""

from __future__ import annotations

from collections.abc import Sequence

from service.errors import InvalidInput
from service.frontend.run.quoting import quote
from service.frontend.run.validation import SESSION_ID_SCHEMA, check_session_id

SESSION_HEADER = "x-session-id"
DESCRIPTION = {
    "name": SESSION_HEADER,
    "in": "header",
    "required": False,
    "description": "Id of the session, for proxies: the same id as elsewhere in the request, or the only one. Empty for none.",
    "schema": {
        "type": "string",
        "maxLength": SESSION_ID_SCHEMA["maxLength"],
        "pattern": f"({SESSION_ID_SCHEMA['pattern']})|^$",
    },
}
"""The header in the OpenAPI document."""


def header_session(values: Sequence[str]) -> str | None:
    """Return the session that the header names, None without one; raises InvalidInput. values: of all headers with this name."""
    if not values or values == [""]:
        return None
    if len(values) > 1:
        raise InvalidInput(f"the request has {len(values)} headers {SESSION_HEADER}: send one", field=SESSION_HEADER)
    return checked_header(values[0])


def checked_header(value: str | None) -> str | None:
    """Return the session that a header names, None without one; raises InvalidInput for a malformed or reserved id."""
    return value and check_session_id(value, field=SESSION_HEADER)


def resolve_session(named: str | None, header: str | None, field: str) -> str | None:
    """Return the session of a request; raises InvalidInput if `field` and the header differ. None: no session is named."""
    if header is None or header == named:
        return named
    if named is None:
        return header
    problem = f"{field} is {quote(named)} and the header {SESSION_HEADER} is {quote(header)}"
    raise InvalidInput(f"{problem}: send the same id in both, or leave one of them out", field=field)
