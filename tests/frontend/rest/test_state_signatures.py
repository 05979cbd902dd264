"""Signed session states: another file, another tenant or another secret is refused, and replicas with the same secrets exchange states."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load

from service.access import state_keys
from service.access.keys import create
from service.access.scopes import Scope
from service.access.state_keys import StateKeys
from service.engine.batching import session_state
from service.errors import Forbidden
from service.frontend.rest.state_signatures import MAX_LOOP_BYTES, check_signature, signed
from service.ipc import session_file
from service.ipc.session_file import StateOrigin
from service.settings import Settings
from tests.frontend.conftest import bearer
from tests.frontend.in_process import in_process
from tests.serving import eventually

TENANT = "sales"
STATE = {"0.hidden": torch.arange(3.0), "0.steps": torch.ones(1)}
UNSIGNED = session_state.pack(STATE, StateOrigin("words", "3", "0af", 7))


@pytest.fixture
def keys(tmp_path: Path) -> StateKeys:
    return new_keys(tmp_path / "state-keys")


def new_keys(file: Path) -> StateKeys:
    state_keys.create(file)
    return StateKeys(Settings(state_keys=str(file)))


def sign(keys: StateKeys, tenant: str = TENANT, state: bytes = UNSIGNED) -> bytes:
    return bytes(asyncio.run(signed(keys, tenant, state)))


def is_accepted(keys: StateKeys, state: bytes, tenant: str = TENANT) -> bool:
    try:
        asyncio.run(check_signature(keys, tenant, state))
    except Forbidden as error:
        assert "SEQSERVE_STATE_KEYS" in error.message
        return False
    return True


def test_signed_state_is_the_same_state(keys: StateKeys) -> None:
    state = sign(keys)
    assert is_accepted(keys, state)
    before, after = session_file.read(UNSIGNED), session_file.read(state)
    assert (before.origin, before.tensors, bytes(before.data)) == (after.origin, after.tensors, bytes(after.data))
    assert all(tensor.equal(STATE[name]) for name, tensor in load(state).items()), "it is a safetensors file"
    assert (len(state) - len(after.data)) % 8 == 0, "its tensors are aligned"


def test_changed_or_foreign_state_is_refused(keys: StateKeys, tmp_path: Path) -> None:
    state = sign(keys)
    for position in range(len(state)):
        changed = bytearray(state)
        changed[position] ^= (0x01, 0x20, 0x80)[position % 3]  # 0x20 changes the case of a letter
        assert not is_accepted(keys, bytes(changed)), position
    assert not any(is_accepted(keys, state[:size]) for size in range(0, len(state), 7))
    assert not any(is_accepted(keys, changed) for changed in (state + b"\0", b"\0" + state, state + state, UNSIGNED))
    assert not any(is_accepted(keys, state, tenant) for tenant in ("sale", "sales1", "", "Sales"))
    assert not is_accepted(new_keys(tmp_path / "others"), state)


def test_large_state_is_signed_beside_the_event_loop(keys: StateKeys) -> None:
    large = session_state.pack({"a": torch.zeros(MAX_LOOP_BYTES)}, StateOrigin("words", "3", "0af", 7))
    state = sign(keys, state=large)
    assert is_accepted(keys, state) and not is_accepted(keys, state[:-1] + b"\1")


def test_nothing_changes_without_secrets(keys: StateKeys) -> None:
    none = StateKeys(Settings())
    assert not none.in_use and not none.reload()
    assert asyncio.run(signed(none, TENANT, UNSIGNED)) is UNSIGNED
    assert is_accepted(none, UNSIGNED) and is_accepted(none, sign(keys)), "replicas get the setting at different times"


def test_replicas_exchange_states_of_a_tenant_while_secrets_are_rotated(models_folder: Path, tmp_path: Path) -> None:
    """A refused state opens nothing, and is audited."""
    file, secrets, successor = tmp_path / "keys.toml", tmp_path / "state-keys", tmp_path / "successor"
    tokens = {tenant: create(file, tenant, [Scope.INFER, Scope.SESSION], tenant) for tenant in (TENANT, "other")}
    state_keys.create(secrets)
    new = new_keys(successor)
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(in_process(models_folder, tmp_path, keys=str(file), state_keys=str(secrets))) for _ in range(2)
        )

        def export() -> bytes:
            return one.client.get("/sessions/mine/state", headers=bearer(tokens[TENANT])).content

        def put(state: bytes, tenant: str = TENANT) -> httpx.Response:
            """Bring a state to the other replica, and delete the session that it opens there."""
            headers = bearer(tokens[tenant])
            answer = other.client.put("/sessions/theirs/state", content=state, headers=headers)
            assert other.client.delete("/sessions/theirs/state", headers=headers).status_code in (answer.status_code, 404)
            return answer

        body = {"model": "sensors", "inputs": [[[1, 2, 3]] * 3], "session": "mine"}
        assert one.client.post("/infer", json=body, headers=bearer(tokens[TENANT])).status_code == 200
        state, unsigned = export(), session_state.pack(STATE, StateOrigin("sensors", "1", "", 3))
        assert put(state).status_code == 200
        forged = state[:99] + bytes([state[99] ^ 1]) + state[100:]
        since, denied = other.log_bytes, other.metric("seqserve_denied_total")
        for tenant, wrong in (("other", state), (TENANT, forged), (TENANT, unsigned), (TENANT, b"{"), (TENANT, b"")):
            refused = put(wrong, tenant)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        entries = [(entry["caller"], entry["outcome"]) for entry in other.events("audit", since=since)]
        assert entries == [("other", "forbidden"), *[(TENANT, "forbidden")] * 4]
        assert other.metric("seqserve_denied_total") == denied + 5
        secrets.write_text(successor.read_text())
        renewed = eventually(lambda: (exported := export()) and is_accepted(new, exported) and exported)
        assert eventually(lambda: put(renewed).status_code == 200) and put(state).status_code == 403
