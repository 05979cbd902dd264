"""How two replicas prove to each other that they belong together, and the authentication of their later frames. Pure.

Both sides know a secret of the peer key file. Each sends a nonce, and proves with an HMAC over both greetings that it knows the secret: a
replayed proof is worthless. The proof also covers the certificate of the accepting side, which rules out a man in the middle with another
certificate. Every frame has an HMAC over its number and its content.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

from service.access.peer_keys import PeerKeys

MAGIC = b"seqserve peer 1\n"
NONCE_BYTES = 32
REPLICA_CHARACTERS = 16
PROOF_BYTES = 64
GREETING_BYTES = len(MAGIC) + NONCE_BYTES + REPLICA_CHARACTERS
MAC_BYTES = 32
DIALER, ACCEPTOR = b"dialer", b"acceptor"


class NotAPeer(Exception):
    """The other side does not prove that it belongs to this service. The message says why."""


class Handshake:
    """One side of a handshake. role: DIALER or ACCEPTOR."""

    def __init__(self, keys: PeerKeys, replica: str, role: bytes) -> None:
        """replica: the id of this replica."""
        assert len(replica) == REPLICA_CHARACTERS, "ids of replicas have one length"
        self._keys = keys
        self._role = role
        self.greeting = MAGIC + secrets.token_bytes(NONCE_BYTES) + replica.encode()
        self._transcript = b""
        self.peer = ""
        """The id of the other replica, not proven before `check`."""

    def greeted(self, greeting: bytes, certificate: bytes) -> None:
        """Take the greeting of the other side. certificate: of the acceptor, empty without TLS. Raises NotAPeer."""
        if len(greeting) != GREETING_BYTES or not greeting.startswith(MAGIC):
            raise NotAPeer("it does not speak this protocol")
        replica = greeting[-REPLICA_CHARACTERS:]
        if not replica.isalnum() or not replica.isascii():
            raise NotAPeer("it has no valid id")
        both = (self.greeting, greeting) if self._role == DIALER else (greeting, self.greeting)
        self._transcript = b"".join((*both, sha256(certificate).digest()))
        self.peer = replica.decode()

    def proof(self) -> bytes:
        """Return the proof of this side."""
        return self._keys.sign([b"proof\0", self._role, self._transcript])

    def check(self, proof: bytes) -> tuple[FrameSeal, FrameSeal]:
        """Return the seals of the frames that this side sends, and of the frames that it receives. Raises NotAPeer for a wrong proof."""
        other = ACCEPTOR if self._role == DIALER else DIALER
        secret = self._keys.signer([b"proof\0", other, self._transcript], proof)
        if secret is None:
            raise NotAPeer("it does not know a secret of SEQSERVE_PEER_KEYS")
        return self._seal(self._keys.first, self._role), self._seal(secret, other)

    def _seal(self, secret: bytes, role: bytes) -> FrameSeal:
        return FrameSeal(hmac.digest(secret, b"frames\0" + role + self._transcript, "sha256"))


class FrameSeal:
    """Authenticates the frames of one direction, which are numbered."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def next(self, content: bytes) -> bytes:
        """Return the HMAC of the next frame."""
        mac = hmac.new(self._key, self._number.to_bytes(8), "sha256")
        mac.update(content)
        self._number += 1
        return mac.digest()

    def check(self, content: bytes, mac: bytes) -> None:
        """Raise NotAPeer unless this is the next frame of the other side."""
        if not hmac.compare_digest(self.next(content), mac):
            raise NotAPeer("a frame was changed on its way")
