"""The state of one sequence on the host, and the bytes by which it travels to another replica: a small safetensors file."""

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
"""By layer and name, without the dimension of places."""
FORMAT = "seqserve state 1"


@dataclass(frozen=True, slots=True)
class Origin:
    """Of which model a state is, whose weights have this digest, after how many steps."""

    model: str
    version: str
    weights: str
    steps: int

    @classmethod
    def of(cls, spec: ModelSpec, key: ModelKey, steps: int) -> Origin:
        return cls(key.name, key.version, spec.sha256.get(WEIGHTS, ""), steps)


def pack(state: State, origin: Origin) -> bytes:
    """A safetensors file whose metadata say where it comes from."""
    said = {"format": FORMAT, "model": origin.model, "version": origin.version, "weights": origin.weights}
    packed: bytes = save(dict(state), metadata=said | {"steps": str(origin.steps)})
    return packed


def unpack(data: bytes) -> tuple[dict[str, Tensor], Origin]:
    """Raises InvalidRequest for what `pack` does not write."""
    try:
        state = load(data)
        (length,) = struct.unpack_from("<Q", data)
        said = json.loads(data[8 : 8 + length])["__metadata__"]
        if said["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        steps = int(said["steps"])
        if not 0 < steps < 1 << 62:
            raise ValueError("its steps are no number above zero")
        return state, Origin(said["model"], said["version"], said["weights"], steps)
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error) as fault:
        raise InvalidRequest(f"the body is no state of a session: {fault}; send what GET on this path answered") from None


def check(state: State, like: State, origin: Origin, expected: Origin) -> None:
    """Raises SessionConflict for a state of other weights, InvalidRequest for tensors that are not as those in `like`."""
    if (origin.model, origin.version, origin.weights) != (expected.model, expected.version, expected.weights):
        raise SessionConflict(
            f"the state is of {origin.model} version {origin.version} with other weights than those that are served here: "
            "begin the session anew"
        )
    shapes, expected_shapes = ({name: tuple(one.shape) for name, one in these.items()} for these in (state, like))
    if shapes != expected_shapes or not all(one.is_floating_point() for one in state.values()):
        raise InvalidRequest("the tensors of the state are not those of the model: send what GET on this path answered")
    if any(bool(one.isnan().any()) for one in state.values()):
        raise InvalidRequest("the state has values that are not numbers: send what GET on this path answered")
