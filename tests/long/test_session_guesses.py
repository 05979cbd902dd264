"""A tenant that guesses the sessions of another finds none, in a million guesses of names and 12,000 requests."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import uvloop

from loadtest.target import JSON, Target
from service.access.caller import Caller as Access
from service.access.keys import create
from service.access.scopes import Scope
from service.frontend.validation import is_session_id
from service.ipc.messages import Share
from tests import models
from tests.accumulator import Account
from tests.callers import Caller, Response
from tests.serving import Server, serving

GUESSES, REQUESTS, CALLERS = 1_000_000, 12_000, 8
SESSIONS = [f"{number:06x}" for number in range(64)]
"""Sessions of the owner. The other tenant knows all ids, and uses half of them itself."""
SHARED = SESSIONS[:32]
CHARACTERS = "".join(chr(code) for code in range(0x20, 0x7F))
VALUES, ONE_CHUNK, TWO_CHUNKS = [2, 2, 0], Account(1, 3), Account(2, 6)


class Tenants(NamedTuple):
    """A service, and the tokens of the owner of the sessions and of the tenant that guesses."""

    server: Server
    owner: str
    guesser: str


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    scratch = tmp_path_factory.mktemp("tenants")
    models.accumulator(scratch / "models")
    keys = scratch / "keys.toml"
    tokens = [create(keys, name, [Scope.INFER, Scope.SESSION], name) for name in ("owner", "guesser")]
    with serving(scratch / "models", scratch, "--keys", str(keys), session_idle_seconds="600", idle_seconds="600") as server:
        yield Tenants(server, *tokens)


def guesses(chance: random.Random) -> Iterator[str]:
    """Yield ids that a client may choose: ids of the owner with a prefix or a suffix, and any other ids."""
    while True:
        made = "".join(chance.choices(CHARACTERS, k=chance.randint(1, 12)))
        known = chance.choice(SESSIONS)
        yield chance.choice(
            (known, made, f"owner/{known}", f"owner:{known}", f"owner{made}{known}", f"{made}{known}", f"{known}{made}")
        )


def test_million_ids_of_a_tenant_name_no_session_of_another() -> None:
    owner, guesser = (Access("key", Share(tenant), frozenset(Scope), 0) for tenant in ("owner", "guesser"))
    owned = {owner.session(id) for id in SESSIONS}
    made, chance = guesses(random.Random(0)), random.Random(1)
    tried = 0
    for id in made:
        if is_session_id(id):
            assert guesser.session(id) not in owned, id
            # A tenant whose name contains the other's, or ends as its ids begin.
            other = Access("key", Share(chance.choice(("owner-", "owner.0", "o", "wner", "owner0"))), frozenset(Scope), 0)
            assert other.session(id) not in owned, id
            tried += 1
        if tried == GUESSES:
            break


def request(tenants: Tenants, token: str, method: str, path: str, body: object = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    sent = Target.of(tenants.server.address, path).request(content, JSON, f"Authorization: Bearer {token}")
    return method.encode() + sent.removeprefix(b"POST")


def chunk(tenants: Tenants, token: str, session: str, **options: object) -> bytes:
    body = {"model": "accumulator", "session": session, "inputs": [VALUES], **options}
    return request(tenants, token, "POST", "/infer", body)


def attempts(tenants: Tenants, session: str) -> list[bytes]:
    """Return every request that reveals something about a session, or changes it."""
    return [
        chunk(tenants, tenants.guesser, session, start=False),
        request(tenants, tenants.guesser, "GET", f"/sessions/{session}/state"),
        request(tenants, tenants.guesser, "DELETE", f"/sessions/{session}/state"),
        request(tenants, tenants.guesser, "POST", f"/sessions/{session}/fork", {"session": "copy"}),
    ]


async def ask(caller: Caller, data: bytes, session: str) -> tuple[int, str]:
    """Return the status and the body of a reply, without the id."""
    reply: Response = await caller.ask(data)
    return reply.status, re.sub(re.escape(session), "ID", reply.body.decode(errors="replace"))


async def account(caller: Caller, data: bytes) -> Account | None:
    """Return the account in an answer, None for an error."""
    reply = await caller.ask(data)
    return Account.told(json.loads(reply.body)["outputs"][0]["value"]) if reply.status == 200 else None


async def guess(tenants: Tenants) -> list[str]:
    """Guess the sessions of the owner, while both tenants use their sessions. Returns the faults."""
    target, faults = Target.of(tenants.server.address, "/infer"), list[str]()
    owner = await Caller.connect(target)
    for session in SESSIONS:
        if (told := await account(owner, chunk(tenants, tenants.owner, session, start=True))) != ONE_CHUNK:
            faults.append(f"the owner's session began with {told}")
    unknown = [await ask(owner, data, "f" * 6) for data in attempts(tenants, "f" * 6)]
    faults += [f"{reply} for a session that never was" for reply in unknown if reply[0] != 404]

    async def work(seed: int) -> None:
        caller, chance = await Caller.connect(target), random.Random(seed)
        for _ in range(REQUESTS // CALLERS // len(unknown)):
            session = chance.choice(SESSIONS[len(SHARED) :])
            for data, expected in zip(attempts(tenants, session), unknown, strict=True):
                if (reply := await ask(caller, data, session)) != expected:
                    faults.append(f"{reply} and not {expected} to {data!r}")
        caller.hang_up()

    async with asyncio.TaskGroup() as group:
        for seed in range(CALLERS):
            group.create_task(work(seed))
    for session in SHARED:
        if (told := await account(owner, chunk(tenants, tenants.guesser, session))) != ONE_CHUNK:
            faults.append(f"the same name of the other tenant has {told}")
    for session in SESSIONS:
        if (told := await account(owner, chunk(tenants, tenants.owner, session, start=False, end=True))) != TWO_CHUNKS:
            faults.append(f"the owner's session has {told}")
    owner.hang_up()
    return faults


def test_guessed_session_looks_as_one_that_never_was(tenants: Tenants) -> None:
    assert uvloop.run(guess(tenants))[:3] == []
