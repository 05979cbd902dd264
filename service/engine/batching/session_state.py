"""The state of a session on the host, and its export format: a small safetensors file."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from service.errors import InvalidRequest, SessionConflict
from service.ipc.messages import ModelKey
from service.modeling.spec import WEIGHTS, ModelSpec

State = Mapping[str, Tensor]
"""The tensors of one state slot, by layer and name."""
FORMAT = "seqserve state 1"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a state comes from: the model version, the digest of its weights, and the steps that led to the state."""

    model: str
    version: str
    weights: str
    steps: int

    @classmethod
    def of(cls, spec: ModelSpec, key: ModelKey, steps: int) -> Origin:
        return cls(key.name, key.version, spec.sha256.get(WEIGHTS, ""), steps)


def pack(state: State, origin: Origin) -> bytes:
    """Return a state as a safetensors file with its origin in the metadata."""
    metadata = {"format": FORMAT, "model": origin.model, "version": origin.version, "weights": origin.weights}
    packed: bytes = save(dict(state), metadata=metadata | {"steps": str(origin.steps)})
    return packed


def unpack(data: bytes) -> tuple[dict[str, Tensor], Origin]:
    """Return the state and the origin that `pack` wrote; raises InvalidRequest for other bytes."""
    try:
        state = load(data)
        (length,) = struct.unpack_from("<Q", data)
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        if metadata["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        steps = int(metadata["steps"])
        if not 0 < steps < 1 << 62:
            raise ValueError("its steps are not a number above zero")
        return state, Origin(metadata["model"], metadata["version"], metadata["weights"], steps)
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error) as error:
        raise InvalidRequest(
            f"the body is not the state of a session: {error}; send the body that GET on this path returned"
        ) from None


def check(state: State, like: State, origin: Origin, expected: Origin) -> None:
    """Validate an imported state. Raises SessionConflict for another origin, InvalidRequest for tensors unlike those of `like`."""
    if (origin.model, origin.version, origin.weights) != (expected.model, expected.version, expected.weights):
        raise SessionConflict(
            f"the state is from {origin.model} version {origin.version} with weights that are not served here: start a new session"
        )
    shapes, expected_shapes = ({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (state, like))
    if shapes != expected_shapes or not all(tensor.is_floating_point() for tensor in state.values()):
        raise InvalidRequest("the tensors of the state do not match the model: send the body that GET on this path returned")
    if any(bool(tensor.isnan().any()) for tensor in state.values()):
        raise InvalidRequest("the state contains NaN: send the body that GET on this path returned")
