"""Messages between a frontend and its decoder."""

from __future__ import annotations

from service.ipc.messages.message import Message, Reply
from service.ipc.messages.models import ModelKey


class DefineModel(Message, frozen=True):
    """A model version whose inputs follow. `spec` is its model.toml as JSON; the trailing bytes are its tokenizer.json, if it has one."""

    version: str
    generation: int
    spec: str


class DecodeBody(Message, frozen=True):
    """Call: parse the body in the trailing bytes, of a request to `api`. The reply is BodyDecoded.

    The decoder keeps the inputs until it receives a Cancel with the id of this call. session: named by the header, for POST /infer. The
    other fields are for the Open Inference Protocol over REST.
    """

    api: str
    header_length: int | None = None
    model: str = ""
    version: str = ""
    session: str | None = None


class PackInputs(Message, frozen=True):
    """Call: validate the inputs of a decoded body for a model. The reply is InputsPacked."""

    body: int
    key: ModelKey


class BodyDecoded(Reply, frozen=True):
    """Everything but the inputs of a body is in the trailing bytes. `body` identifies the inputs."""

    body: int


class InputsPacked(Reply, frozen=True):
    """Number of time steps of each input. The inputs follow, packed end to end, and `state_bytes` bytes of states as in `RequestBlock`."""

    lengths: list[int]
    state_bytes: int = 0
