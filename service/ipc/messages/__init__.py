"""Every message between processes: one tagged struct each. A receiver chooses the handler by the type of the message.

A message travels in a frame (`channel.py`), which also has an id and, for tensors and states, trailing bytes. A call and its reply have the
same id (`rpc.py`), and so have a request and its answer. Nothing here knows HTTP, sockets or torch.
"""

from __future__ import annotations

from service.ipc.messages import control, decoder, inference, sessions, store, tracing
from service.ipc.messages.message import Message, Reply

__all__ = ["ALL", "control", "decoder", "inference", "sessions", "store", "tracing"]


def _concrete(base: type[Message]) -> list[type[Message]]:
    return [kind for child in base.__subclasses__() for kind in ([child] if child is not Reply else _concrete(child))]


ALL = tuple(_concrete(Message))
"""Every message type."""
