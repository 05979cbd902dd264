"""The state of a session on the host, and its tensors in an exported file."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from service.errors import InvalidRequest, SessionConflict
from service.ipc.messages.models import ModelKey
from service.ipc.session_file import ALIGNMENT, ID_DTYPES, METADATA, StateOrigin, StoredTensor, metadata_of
from service.modeling.spec import WEIGHTS, ModelSpec

State = Mapping[str, Tensor]
"""The tensors of one state slot, by layer and name."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "I64": torch.int64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def origin_of(spec: ModelSpec, key: ModelKey, steps: int) -> StateOrigin:
    """Return the origin of a state that `steps` steps of a model version led to."""
    return StateOrigin(key.name, key.version, spec.sha256.get(WEIGHTS, ""), steps)


def pack(state: State, origin: StateOrigin) -> bytes:
    """Return a state as a safetensors file with its origin in the metadata.

    The library takes several times as long for small tensors, and all sessions of a replica are packed at its end.
    """
    header: dict[str, object] = {METADATA: metadata_of(origin)}
    parts: list[bytes] = []
    end = 0
    # Larger elements first: so each tensor is aligned.
    for name, tensor in sorted(state.items(), key=lambda item: (-item[1].element_size(), item[0])):
        data = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (end, end + len(data))}
        parts.append(data)
        end += len(data)
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % ALIGNMENT)
    return b"".join((len(text).to_bytes(ALIGNMENT, "little"), text, *parts))


def check_origin(origin: StateOrigin, expected: StateOrigin) -> None:
    """Raise SessionConflict if a state is from another model version, or from other weights."""
    if (origin.model, origin.version, origin.weights) != (expected.model, expected.version, expected.weights):
        raise SessionConflict(
            f"the state is from {origin.model} version {origin.version} with weights that are not served here: start a new session"
        )


def unpack(
    tensors: Mapping[str, StoredTensor], data: bytes | memoryview, like: State, *, trusted: bool = False
) -> dict[str, Tensor]:
    """Return an imported state as copies of its bytes. Raises InvalidRequest for tensors that differ in form from `like`.

    Names and shapes are compared before anything is allocated. A replica with another kind of device may have stored another dtype.
    trusted: the state comes from another replica, and may have the ids of earlier steps.
    """
    shapes = {name: stored.shape for name, stored in tensors.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in like.items()}
    # The ids of earlier steps, which a folded QRNN keeps, come in no state of a client: they are rows of a table.
    has_ids = {name for name, tensor in like.items() if not tensor.is_floating_point()}
    ids_stored = {name for name, stored in tensors.items() if stored.dtype in ID_DTYPES}
    if shapes != expected or ids_stored != (has_ids if trusted else set()) or (has_ids and not trusted):
        raise InvalidRequest("the tensors of the state do not match the model: send the body that GET on this path returned")
    state = {name: _tensor(tensor, data).to(like[name].dtype) for name, tensor in tensors.items()}
    if not all(bool(tensor.isfinite().all()) for tensor in state.values()):
        raise InvalidRequest("the state contains values that are not finite: send the body that GET on this path returned")
    return state


def _tensor(stored: StoredTensor, data: bytes | memoryview) -> Tensor:
    begin, end = stored.data_offsets
    if begin == end:
        return torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    # A copy is aligned and writable, and does not keep the whole frame in memory.
    return torch.frombuffer(bytearray(data[begin:end]), dtype=DTYPES[stored.dtype]).reshape(stored.shape)
