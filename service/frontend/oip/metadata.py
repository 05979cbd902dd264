"""Metadata of the service and its models in the Open Inference Protocol: tensors, configuration, versions and repository.

REST and gRPC return the same values. Nothing here knows HTTP or gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from service import __version__, triton_statistics
from service.errors import InvalidInput, Unsupported
from service.frontend.oip.tensors import BYTES
from service.frontend.run.catalog import ServedModel
from service.frontend.run.frontend import Frontend
from service.frontend.run.quoting import quote
from service.ipc.messages.control import MAX_POLICY_CHARACTERS
from service.modeling.spec import ModelSpec

EXTENSIONS = (
    *("binary_tensor_data", "classification", "parameters", "sequence", "sequence(string_id)"),
    *("model_configuration", "model_repository", "statistics"),
)
PLATFORM = "seqserve"
UNSUPPORTED_EXTENSION = "shared memory, trace settings and log settings are not supported: send tensors with the request"
"""The error message for extensions of Triton that this service does not have."""
LENGTHS, OFFSETS = "lengths", "offsets"
INTEGERS = ("INT32", "INT64")
VALUE_INPUTS = {"text": (BYTES,), "ids": INTEGERS, "inputs": ("FP32", "FP16", "BF16", "FP64")}
"""The inputs that hold the values of a request, of which it has one, and their datatypes. The first needs no conversion."""
STATE = "state."
"""Prefix of the tensors of the states of recurrent layers: inputs to start from them, outputs to get them."""
VERSION_POLICY = "version_policy"


class _AllVersions(msgspec.Struct, forbid_unknown_fields=True):
    """Serve every version."""


class _LatestVersions(msgspec.Struct, forbid_unknown_fields=True):
    """Serve the newest versions."""

    num_versions: Annotated[int, Meta(ge=1, le=9999)]


class _SpecificVersions(msgspec.Struct, forbid_unknown_fields=True):
    """Serve the listed versions."""

    versions: Annotated[list[Annotated[int, Meta(ge=1, lt=10**9)]], Meta(min_length=1)]


class _VersionPolicy(msgspec.Struct, forbid_unknown_fields=True):
    """Triton's ModelVersionPolicy. Exactly one field must be set."""

    all: _AllVersions | None = None
    latest: _LatestVersions | None = None
    specific: _SpecificVersions | None = None


class TensorMetadata(NamedTuple):
    """An input or output tensor of a model. dims: the dimensions of one sequence; -1 accepts any size."""

    name: str
    datatype: str
    dims: tuple[int, ...]


def inputs(spec: ModelSpec) -> list[TensorMetadata]:
    """Return the input that a request needs. A request may have others (`other_inputs`), which the metadata does not list: load
    generators send every input that it lists."""
    if spec.input.features is not None:
        return [TensorMetadata("inputs", VALUE_INPUTS["inputs"][0], (-1, spec.input.features))]
    name = "text" if spec.input.kind == "text" else "ids"
    return [TensorMetadata(name, VALUE_INPUTS[name][0], (1 if name == "text" else -1,))]


def other_inputs(spec: ModelSpec) -> list[str]:
    """Return the names of the inputs that a request may also have: ids instead of a text, and the layout of its sequences."""
    return [*(["ids"] if spec.input.kind == "text" else []), LENGTHS, OFFSETS]


def outputs(spec: ModelSpec) -> list[TensorMetadata]:
    """Return the outputs of a model: the head's outputs, then the outputs that a request must name to receive them."""
    head = head_outputs(spec)
    others = [TensorMetadata("embedding", "FP32", (spec.embedding_width,))] if spec.has_embedding else []
    if spec.has_steps:
        layout = [TensorMetadata(LENGTHS, "INT32", (1,)), TensorMetadata(OFFSETS, "INT32", (-1,))]
        others += [TensorMetadata("sequence", "FP32", (-1, spec.output_width)), *layout]
    return [*head, *(tensor for tensor in others if tensor not in head)]


def state_tensors(spec: ModelSpec) -> list[TensorMetadata]:
    """Return the tensors of a model's states. A request may send them as inputs and ask for them as outputs.

    They are not part of the metadata: some clients ask for every output that it lists.
    """
    return [TensorMetadata(f"{STATE}{name}", "FP32", (width,)) for name, width in spec.states.items()]


def head_outputs(spec: ModelSpec) -> list[TensorMetadata]:
    """Return the outputs of a model's head."""
    return [TensorMetadata(field.name, field.dtype, field.dims) for field in spec.answer_fields]


def server_metadata() -> dict[str, Any]:
    """Return the name and version of the server and the protocol extensions that it supports."""
    return {"name": "seqserve", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(frontend: Frontend, name: str, version: str) -> dict[str, Any]:
    """Return the versions and tensors of a model; raises UnknownModel. version: empty for the newest version, as below."""
    served = frontend.catalog.find(name, version or None)
    return {
        "name": served.spec.name,
        "versions": list(frontend.catalog.index[name]),
        "platform": PLATFORM,
        "inputs": [_tensor_metadata(tensor) for tensor in inputs(served.spec)],
        "outputs": [_tensor_metadata(tensor) for tensor in outputs(served.spec)],
    }


def model_config(frontend: Frontend, name: str, version: str) -> dict[str, Any]:
    """Return a model's configuration as Triton's ModelConfig; raises UnknownModel."""
    served = frontend.catalog.find(name, version or None)
    return {
        "name": served.spec.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        VERSION_POLICY: {"specific": {"versions": [int(number) for number in frontend.catalog.index[name]]}},
        "max_batch_size": frontend.settings.max_inputs,
        "input": [{**_tensor_config(tensor), "optional": False} for tensor in inputs(served.spec)],
        "output": [_tensor_config(tensor) for tensor in outputs(served.spec)],
        **_scheduling(frontend, served),
    }


def model_ready(frontend: Frontend, name: str, version: str) -> bool:
    """Return whether an engine serves a model; raises UnknownModel, or Unavailable for a model that cannot be served."""
    key = frontend.catalog.find(name, version or None).key
    return frontend.ready and any(loaded.key == key for loaded in frontend.dispatcher.models)


async def model_statistics(frontend: Frontend, write: Callable[[Any], bytes], name: str = "", version: str = "") -> bytes:
    """Return Triton's statistics of a version, of all versions of a model, or of all models; raises UnknownModel.

    write: encodes the response, once for all callers that share it.
    """
    if version:
        served = [frontend.catalog.find(name, version)]
    else:
        served = (
            list(frontend.catalog.index[frontend.catalog.find(name, None).spec.name].values())
            if name
            else frontend.catalog.served
        )
    snapshot, labels = await frontend.supervisor.scrape(), [model.key.labels for model in served]
    if snapshot is not frontend.statistics[0]:
        frontend.statistics = snapshot, {}
    written, key = frontend.statistics[1], (write, *labels)
    if key not in written:
        written[key] = write({"model_stats": triton_statistics.statistics(snapshot, labels)})
    return written[key]


async def repository_index(frontend: Frontend, *, ready: bool) -> list[dict[str, Any]]:
    """Return every version in the models folder, or only the versions that are ready."""
    entries = await frontend.supervisor.index()
    return [msgspec.structs.asdict(entry) for entry in entries if entry.state == "READY" or not ready]


def version_policy(parameters: Mapping[str, Any]) -> str | None:
    """Return the version policy of a load request in the syntax of the setting `versions`, or None if the request has none.

    Raises InvalidInput for an invalid policy, and Unsupported for parameters that only the model's folder can set.
    """
    for name in parameters:
        if name.startswith("file:"):
            field = f"parameters.{quote(name)}"
            problem = "model files cannot be uploaded: copy them to the models folder, and load the model again"
            raise Unsupported(problem, field=field)
    if "config" not in parameters:
        return None
    try:
        config = msgspec.json.decode(parameters["config"], type=dict[str, Any])
    except (TypeError, ValueError, RecursionError):
        raise _policy_error("config is not a JSON object in a string") from None
    for name in config:
        if name != VERSION_POLICY:
            problem = f"config sets {quote(name)}, but only {VERSION_POLICY} can be set here"
            raise Unsupported(f"{problem}: leave it out, or set it in the model's folder", field="parameters.config")
    return _versions_setting(config[VERSION_POLICY]) if config else None


def _versions_setting(policy: Any) -> str:
    """Return a version policy in the syntax of the setting `versions`."""
    try:
        converted = msgspec.convert(policy, _VersionPolicy)
    except msgspec.ValidationError as error:
        raise _policy_error(f"{VERSION_POLICY} is invalid ({error})") from None
    match converted:
        case _VersionPolicy(all=_AllVersions(), latest=None, specific=None):
            return "all"
        case _VersionPolicy(all=None, latest=_LatestVersions(count), specific=None):
            return f"latest:{count}"
        case _VersionPolicy(all=None, latest=None, specific=_SpecificVersions(versions)):
            setting = ",".join(map(str, versions))
            if len(setting) > MAX_POLICY_CHARACTERS:
                problem = f"{VERSION_POLICY} has {len(setting)} characters and at most {MAX_POLICY_CHARACTERS} are allowed"
                raise InvalidInput(f"{problem}: list fewer versions", field="parameters.config")
            return setting
    raise _policy_error(f"{VERSION_POLICY} must have exactly one of all, latest and specific")


def _policy_error(problem: str) -> InvalidInput:
    example = f'{{"{VERSION_POLICY}": {{"latest": {{"num_versions": 1}}}}}}'
    others = '"all": {} or "specific": {"versions": [1, 2]}'
    return InvalidInput(f"{problem}: send {example}, or {others} instead of latest", field="parameters.config")


def _scheduling(frontend: Frontend, served: ServedModel) -> dict[str, Any]:
    """Return Triton's scheduling choice: sequence batching if the model supports sessions."""
    if any(loaded.key == served.key and loaded.streams for loaded in frontend.dispatcher.models):
        return {"sequence_batching": {"max_sequence_idle_microseconds": round(frontend.settings.session_idle_seconds * 1e6)}}
    return {"dynamic_batching": {}}


def _tensor_metadata(tensor: TensorMetadata) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": [-1, *tensor.dims]}


def _tensor_config(tensor: TensorMetadata) -> dict[str, Any]:
    datatype = "STRING" if tensor.datatype == BYTES else tensor.datatype
    return {"name": tensor.name, "data_type": f"TYPE_{datatype}", "dims": list(tensor.dims)}
