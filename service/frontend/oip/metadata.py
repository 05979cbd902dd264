"""What the Open Inference Protocol says of the service and its models: their tensors, metadata, configuration and versions.

Both faces of the protocol say it in these words. Nothing here knows HTTP or gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from service import __version__
from service.errors import InvalidInput, Unsupported
from service.frontend.inference import Frontend
from service.frontend.oip import statistics as counts_by_model
from service.frontend.oip.tensors import BYTES
from service.frontend.served_model import ServedModel
from service.frontend.wording import shown
from service.modeling.spec import ClassifyHead, EmbedHead, ModelSpec, NextHead, RegressHead, SequenceHead, SpanHead, TagHead

EXTENSIONS = (
    *("binary_tensor_data", "classification", "parameters", "sequence", "sequence(string_id)"),
    *("model_configuration", "model_repository", "statistics"),
)
PLATFORM = "seqserve"
NOT_HERE = "shared memory, traces and logs are not set up by this protocol here: send tensors with the request"
"""What is told to who asks for an extension that this service has not."""
LENGTHS, OFFSETS = "lengths", "offsets"
POLICY = "version_policy"


class _All(msgspec.Struct, forbid_unknown_fields=True):
    """Every version."""


class _Latest(msgspec.Struct, forbid_unknown_fields=True):
    """The newest ones."""

    num_versions: Annotated[int, Meta(ge=1, le=9999)]


class _Specific(msgspec.Struct, forbid_unknown_fields=True):
    """These."""

    versions: Annotated[list[Annotated[int, Meta(ge=1, lt=10**9)]], Meta(min_length=1)]


class _Policy(msgspec.Struct, forbid_unknown_fields=True):
    """Triton's ModelVersionPolicy, which is one of these."""

    all: _All | None = None
    latest: _Latest | None = None
    specific: _Specific | None = None


class Port(NamedTuple):
    """A tensor that a model takes or gives. dims: those of one row, -1 where any size will do."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False


def inputs(spec: ModelSpec) -> list[Port]:
    """What a model takes: the values, and how rows stand in them when they are not all of one length."""
    rows = [Port(LENGTHS, "INT32", (1,), optional=True), Port(OFFSETS, "INT32", (-1,), optional=True)]
    if spec.input.features is not None:
        return [Port("inputs", "FP32", (-1, spec.input.features)), *rows]
    if spec.input.kind == "text":
        return [Port("text", BYTES, (1,)), Port("ids", "INT32", (-1,), optional=True), *rows]
    return [Port("ids", "INT32", (-1,)), *rows]


def outputs(spec: ModelSpec) -> list[Port]:
    """What a model gives: what its head says, and then what else may be asked for."""
    own = said(spec)
    more = [Port("embedding", "FP32", (_width(spec),))] if spec.has_embedding else []
    if spec.has_steps:
        steps = [Port(LENGTHS, "INT32", (1,)), Port(OFFSETS, "INT32", (-1,))]
        more += [Port("sequence", "FP32", (-1, _width(spec))), *steps]
    return [*own, *(port for port in more if port not in own)]


def said(spec: ModelSpec) -> list[Port]:
    """What the head of a model says."""
    match spec.head:
        case ClassifyHead(labels=labels):
            return [Port("label", BYTES, (1,)), Port("score", "FP32", (1,)), Port("scores", "FP32", (len(labels),))]
        case RegressHead(outputs=count):
            return [Port("value", "FP32", (count,))]
        case TagHead():
            return [Port("labels", BYTES, (-1,)), Port("scores", "FP32", (-1,))]
        case SpanHead():
            return [Port("start", "INT32", (1,)), Port("end", "INT32", (1,)), Port("score", "FP32", (1,))]
        case NextHead(top=top):
            return [Port("ids", "INT32", (top,)), Port("scores", "FP32", (top,))]
        case EmbedHead():
            return [Port("embedding", "FP32", (_width(spec),))]
        case SequenceHead():
            return [Port("sequence", "FP32", (-1, _width(spec)))]


def server_metadata() -> dict[str, Any]:
    """Who this is, and which extensions of the protocol it has."""
    return {"name": "seqserve", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(frontend: Frontend, name: str, version: str) -> dict[str, Any]:
    """The tensors of a model, rows first; raises UnknownModel. version: empty for the newest, here and below."""
    served = frontend.models.find(name, version or None)
    return {
        "name": served.spec.name,
        "versions": list(frontend.catalog[name]),
        "platform": PLATFORM,
        "inputs": [_described(port) for port in inputs(served.spec)],
        "outputs": [_described(port) for port in outputs(served.spec)],
    }


def model_config(frontend: Frontend, name: str, version: str) -> dict[str, Any]:
    """A model in the words of Triton's ModelConfig; raises UnknownModel."""
    served = frontend.models.find(name, version or None)
    return {
        "name": served.spec.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        POLICY: {"specific": {"versions": [int(one) for one in frontend.catalog[name]]}},
        "max_batch_size": frontend.settings.max_inputs,
        "input": [{**_configured(port), "optional": port.optional} for port in inputs(served.spec)],
        "output": [_configured(port) for port in outputs(served.spec)],
        **_scheduling(frontend, served),
    }


def ready(frontend: Frontend, name: str, version: str) -> bool:
    """Whether a model is answered for; raises UnknownModel."""
    key = frontend.models.find(name, version or None).key
    return frontend.ready and any(one.key == key for one in frontend.engines.models)


async def statistics(frontend: Frontend, name: str = "", version: str = "") -> dict[str, Any]:
    """What became of the requests to a version, to all versions of a model, or to all models, in Triton's words; raises UnknownModel."""
    if version:
        served = [frontend.models.find(name, version)]
    else:
        served = list(frontend.catalog[frontend.models.find(name, None).spec.name].values()) if name else frontend.models.served
    counts = await frontend.supervisor.scrape()
    return {"model_stats": counts_by_model.statistics(counts, [one.key.labels for one in served])}


async def index(frontend: Frontend, *, ready: bool) -> list[dict[str, Any]]:
    """Every version in the models folder, or those alone that are ready."""
    listed = await frontend.supervisor.index()
    return [msgspec.structs.asdict(one) for one in listed if one.state == "READY" or not ready]


def policy(parameters: Mapping[str, Any]) -> str | None:
    """By which rule the caller who has a model loaded wants its versions chosen, as `Supervised.load` takes it; None when he does not say.

    Raises Unsupported for all else that such a caller may want of a model, which its folder alone says.
    """
    for name in parameters:
        if name.startswith("file:"):
            field = f"parameters.{shown(name)}"
            raise Unsupported("a model's files are read from the models folder: put them there, and load it", field=field)
    if "config" not in parameters:
        return None
    config = _object(parameters["config"])
    for name in config:
        if name != POLICY:
            said = f"config has {shown(name)}, and all but {POLICY} is said in the model's folder: leave it out"
            raise Unsupported(said, field="parameters.config")
    return _rule(config[POLICY]) if config else None


def _object(config: Any) -> dict[str, Any]:
    try:
        return msgspec.json.decode(config, type=dict[str, Any])
    except (TypeError, ValueError, RecursionError):
        raise _no_policy("config is not a JSON object in a string") from None


def _rule(policy: Any) -> str:
    """In the words of the setting `versions`."""
    try:
        said = msgspec.convert(policy, _Policy)
    except msgspec.ValidationError as fault:
        raise _no_policy(f"{POLICY} is none that there is ({fault})") from None
    match said:
        case _Policy(all=_All(), latest=None, specific=None):
            return "all"
        case _Policy(all=None, latest=_Latest(count), specific=None):
            return f"latest:{count}"
        case _Policy(all=None, latest=None, specific=_Specific(versions)):
            return ",".join(map(str, versions))
    raise _no_policy(f"{POLICY} is not exactly one")


def _no_policy(said: str) -> InvalidInput:
    like = f'{{"{POLICY}": {{"latest": {{"num_versions": 1}}}}}}, or all {{}}, or specific {{"versions": [1, 2]}}'
    return InvalidInput(f"{said}: send {like}", field="parameters.config")


def _scheduling(frontend: Frontend, served: ServedModel) -> dict[str, Any]:
    """Triton's name for it: whether a request may be the next chunk of a sequence."""
    if any(one.key == served.key and one.streams for one in frontend.engines.models):
        return {"sequence_batching": {"max_sequence_idle_microseconds": round(frontend.settings.session_idle_seconds * 1e6)}}
    return {"dynamic_batching": {}}


def _width(spec: ModelSpec) -> int:
    return spec.layers[-1].outputs


def _described(port: Port) -> dict[str, Any]:
    return {"name": port.name, "datatype": port.datatype, "shape": [-1, *port.dims]}


def _configured(port: Port) -> dict[str, Any]:
    datatype = "STRING" if port.datatype == BYTES else port.datatype
    return {"name": port.name, "data_type": f"TYPE_{datatype}", "dims": list(port.dims)}
