"""Requests and the replies that they must get, byte for byte, in JSON Lines files. Bytes are written as the characters of Latin-1.

After a change of the wire format that is meant, `RECORD=1 make test FILES="..."` with the tests that use these files records new replies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent
REQUESTS, SESSION, CALLS = (FOLDER / f"{name}.jsonl" for name in ("requests", "session", "calls"))
"""Independent requests of HTTP, the requests of one session in their order, and calls of ModelInfer."""


def check(file: Path, reply: Callable[[bytes], bytes]) -> None:
    """Check the reply to each request of a file. reply: returns the reply to a request, without dates and ids."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    replies = [reply(line["request"].encode("latin-1")) for line in lines]
    if os.environ.get("RECORD"):
        recorded = [line | {"reply": each.decode("latin-1")} for line, each in zip(lines, replies, strict=True)]
        file.write_text("".join(json.dumps(line) + "\n" for line in recorded))
        return
    for line, actual in zip(lines, replies, strict=True):
        assert actual == line["reply"].encode("latin-1"), line["request"]
