"""Signed session states: another file, another tenant or another secret is refused, and replicas with the same secrets exchange states."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

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
from service.frontend.state_signatures import MAX_LOOP_BYTES, check_signature, signed
from service.ipc import session_file
from service.ipc.session_file import Origin
from service.settings import Settings
from tests.frontend.in_process import InProcess, in_process
from tests.serving import eventually

TENANT = "sales"
STATE = {"0.hidden": torch.arange(3.0), "0.steps": torch.ones(1)}
UNSIGNED = session_state.pack(STATE, Origin("words", "3", "0af", 7))


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


def test_state_with_any_byte_changed_is_refused(keys: StateKeys) -> None:
    state = sign(keys)
    for position in range(len(state)):
        changed = bytearray(state)
        changed[position] ^= (0x01, 0x20, 0x80)[position % 3]  # 0x20 changes the case of a letter
        assert not is_accepted(keys, bytes(changed)), position


def test_state_that_is_cut_or_longer_is_refused(keys: StateKeys) -> None:
    state = sign(keys)
    assert not any(is_accepted(keys, state[:size]) for size in range(len(state)))
    assert not any(is_accepted(keys, changed) for changed in (state + b"\0", b"\0" + state, state + state, UNSIGNED))


def test_state_of_another_tenant_or_secret_is_refused(keys: StateKeys, tmp_path: Path) -> None:
    for tenant in ("sale", "sales1", "", "Sales"):
        assert not is_accepted(keys, sign(keys), tenant)
    assert not is_accepted(new_keys(tmp_path / "others"), sign(keys))


def test_large_state_is_signed_beside_the_event_loop(keys: StateKeys) -> None:
    large = session_state.pack({"a": torch.zeros(MAX_LOOP_BYTES)}, Origin("words", "3", "0af", 7))
    state = sign(keys, state=large)
    assert is_accepted(keys, state) and not is_accepted(keys, state[:-1] + b"\1")


def test_nothing_changes_without_secrets(keys: StateKeys) -> None:
    none = StateKeys(Settings())
    assert asyncio.run(signed(none, TENANT, UNSIGNED)) is UNSIGNED
    assert is_accepted(none, UNSIGNED) and is_accepted(none, sign(keys)), "replicas get the setting at different times"


class Replicas(NamedTuple):
    """Two services with the same keys and the same secrets."""

    servers: list[InProcess]
    tokens: dict[str, str]
    secrets: Path

    def send(self, replica: int, method: str, path: str, tenant: str = TENANT, **options: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.tokens[tenant]}"}
        return self.servers[replica].client.request(method, path, headers=headers, **options)  # type: ignore[arg-type]

    def chunk(self, replica: int, id: str, *, start: bool = False) -> httpx.Response:
        """Send three steps of a session."""
        body = {"model": "sensors", "inputs": [[[1, 2, 3]] * 3], "session": id, "start": start}
        return self.send(replica, "POST", "/infer", json=body)

    def steps(self, replica: int, id: str, *, start: bool = False) -> int:
        return int(self.chunk(replica, id, start=start).json()["session"]["steps"])


@pytest.fixture(scope="module")
def replicas(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    scratch = tmp_path_factory.mktemp("replicas")
    file, secrets = scratch / "keys.toml", scratch / "state-keys"
    tokens = {tenant: create(file, tenant, [Scope.INFER, Scope.SESSION, Scope.METRICS], tenant) for tenant in (TENANT, "other")}
    state_keys.create(secrets)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(in_process(models_folder, scratch, keys=str(file), state_keys=str(secrets))) for _ in range(2)
        ]
        yield Replicas(servers, tokens, secrets)


def test_state_moves_between_replicas_of_the_same_tenant(replicas: Replicas) -> None:
    assert replicas.steps(0, "moving", start=True) == 3
    state = replicas.send(0, "GET", "/sessions/moving/state").content
    assert replicas.send(1, "PUT", "/sessions/moved/state", content=state).status_code == 200
    assert replicas.steps(1, "moved") == 6
    assert replicas.send(1, "POST", "/sessions/moved/fork", json={"session": "copy"}).status_code == 200
    assert replicas.steps(1, "copy") == 9


def test_refused_state_opens_nothing_and_is_audited(replicas: Replicas) -> None:
    replicas.chunk(0, "mine", start=True)
    state = replicas.send(0, "GET", "/sessions/mine/state").content
    position = len(state) // 2
    forged = state[:position] + bytes([state[position] ^ 1]) + state[position + 1 :]
    unsigned = session_state.pack(STATE, Origin("sensors", "1", "", 3))
    since, denied = replicas.servers[0].log_bytes, replicas.servers[0].metric("seqserve_denied_total")
    for tenant, body in (("other", state), (TENANT, forged), (TENANT, unsigned), (TENANT, b"{"), (TENANT, b"")):
        refused = replicas.send(0, "PUT", "/sessions/theirs/state", tenant, content=body)
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        assert "SEQSERVE_STATE_KEYS" in refused.json()["error"]
    entries = replicas.servers[0].events("audit", since=since)
    assert [(entry["caller"], entry["outcome"]) for entry in entries] == [("other", "forbidden"), *[(TENANT, "forbidden")] * 4]
    assert replicas.servers[0].metric("seqserve_denied_total") == denied + 5
    assert replicas.send(0, "GET", "/sessions/theirs/state").status_code == 404


def test_secrets_are_rotated_without_a_restart(replicas: Replicas, tmp_path: Path) -> None:
    replicas.chunk(0, "rotating", start=True)
    successor = new_keys(tmp_path / "successor")

    def exported() -> bytes:
        return replicas.send(0, "GET", "/sessions/rotating/state").content

    def accepts(state: bytes) -> bool:
        status = replicas.send(1, "PUT", "/sessions/rotating/state", content=state).status_code
        replicas.send(1, "DELETE", "/sessions/rotating/state")
        return status == 200

    old, before = exported(), replicas.secrets.read_text()
    replicas.secrets.write_text((tmp_path / "successor").read_text() + before)
    new = eventually(lambda: (state := exported()) and is_accepted(successor, state) and state)
    assert eventually(lambda: accepts(new)) and accepts(old)
    replicas.secrets.write_text((tmp_path / "successor").read_text())
    eventually(lambda: not accepts(old))
    assert accepts(new)
