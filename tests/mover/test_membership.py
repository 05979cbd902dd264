"""Which replicas exist: only a certain end counts as an end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from service.errors import SettingsError
from service.mover.addresses import Address, CannotLookUp, look_up
from service.mover.hand_over import shares
from service.mover.membership import UNLISTED_SECONDS, Membership, Spot
from service.settings import load

HERE, THERE = Address("10.0.0.1", 8002), Address("10.0.0.2", 8002)


def connected() -> Membership:
    """Return a membership with one other replica."""
    members = Membership()
    members.listed({HERE, THERE}, 0.0)
    members.found(HERE, Spot.SELF)
    members.found(THERE, Spot.CONNECTED, "b")
    members.connected("b")
    return members


def test_nothing_is_known_before_the_first_list() -> None:
    members = Membership()
    assert not members.complete
    members.listed({HERE}, 0.0)
    assert not members.complete
    members.found(HERE, Spot.SELF)
    assert members.complete and members.known == set()


def test_silent_replica_may_still_hold_sessions() -> None:
    members = connected()
    members.disconnected("b", 1.0)
    members.found(THERE, Spot.UNKNOWN)
    members.tick(1000.0)
    assert (members.reachable, members.known, members.gone) == (set(), {"b"}, set())


@pytest.mark.parametrize("end", ["refuses", "another answers", "not listed", "goodbye"])
def test_certain_ends(end: str) -> None:
    members = connected()
    if end == "goodbye":
        members.said_goodbye("b")
    members.disconnected("b", 1.0)
    match end:
        case "refuses":
            members.found(THERE, Spot.REFUSES)
        case "another answers":
            members.found(THERE, Spot.CONNECTED, "c")
            members.connected("c")
        case "not listed":
            members.listed({HERE}, 1.0)
    assert members.gone == {"b"} and "b" not in members.known
    assert members.complete


def test_replica_that_is_not_listed_but_answers_stays() -> None:
    members = connected()
    members.listed({HERE}, 1.0)
    assert members.reachable == {"b"}


def test_unlisted_replica_is_given_up_after_a_while() -> None:
    members = connected()
    members.connected("new")
    members.disconnected("new", 1.0)
    members.tick(1.0 + UNLISTED_SECONDS / 2)
    assert "new" in members.known
    members.tick(1.1 + UNLISTED_SECONDS)
    assert "new" in members.gone


def test_replica_with_two_connections_stays_with_one() -> None:
    members = connected()
    members.connected("b")
    members.disconnected("b", 1.0)
    assert members.reachable == {"b"}


def test_addresses_come_from_a_list_a_file_or_a_name(tmp_path: Path) -> None:
    file = tmp_path / "peers"
    file.write_text("# written by the cluster\n10.0.0.1:8002\n\n[::1]:8003\n")
    assert asyncio.run(look_up(f"file:{file}")) == {HERE, Address("::1", 8003)}
    assert asyncio.run(look_up("10.0.0.1:8002,10.0.0.2:8002")) == {HERE, THERE}
    assert Address("127.0.0.1", 8002) in asyncio.run(look_up("dns:localhost:8002"))


@pytest.mark.parametrize("peers", ["file:/nothing/there", "dns:no.such.name.invalid:8002"])
def test_addresses_that_cannot_be_looked_up(peers: str) -> None:
    with pytest.raises(CannotLookUp):
        asyncio.run(look_up(peers))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peers": "dns:name"}, "use dns:NAME:PORT"),
        ({"peers": "a:1, b:2", "peer_keys": "k"}, "use dns:NAME:PORT"),
        ({"peers": "a:1"}, "peers needs peer_keys"),
        ({"peers": "a:1", "peer_keys": "k", "port": 8002}, "port and peer_port are both 8002"),
        ({"checkpoints": "http://host"}, "use the path of a folder"),
    ],
)
def test_wrong_settings_stop_the_start(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(settings, {})


def test_offers_are_spread_and_stable() -> None:
    names = [f"session-{number}" for number in range(300)]
    first = shares(names, ["a", "b", "c"])
    assert sorted(name for share in first.values() for name in share) == sorted(names)
    assert min(map(len, first.values())) > 60
    fewer = shares(names, ["a", "b"])
    assert set(first["a"]) <= set(fewer["a"]), "the share of a replica does not depend on the others"
