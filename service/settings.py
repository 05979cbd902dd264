"""Every setting of the service, defined once.

Settings are read once at the start and passed down as plain values. A flag overrides a `SEQSERVE_*` variable, and a variable
overrides the TOML file. An unknown name or an impossible value stops the start.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from service.errors import SettingsError

PREFIX = "SEQSERVE_"
CONFIG = "SEQSERVE_CONFIG"
"""Variable that names the TOML file."""
CLIENT_KEY = "SEQSERVE_CLIENT_KEY"
"""Variable with the key that our clients send. The service ignores it."""
NO_SETTINGS = {CONFIG, CLIENT_KEY}

VERSIONS = re.compile(r"all|latest(:[1-9][0-9]{0,3})?|[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*")
"""Syntax of a rule that selects versions of a model."""
SERVICE_LINK = re.compile(r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
"""Names of the variables that Kubernetes sets for each Service, besides SERVICE_PORT, which has an address as its value."""
LINKED_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
HERE = Path(__file__).resolve().parent
EMBEDDED_MODELS = HERE / "embedded_models" if (HERE / "embedded_models").is_dir() else HERE.parent / "models"
"""The wheel contains the repository's models inside this package."""
USER_MODELS = Path("~/.local/share/seqserve/models")
"""Where commands write models if no models folder is named: the embedded models are part of the installation, or of a checkout."""
BODY_CEILING_BYTES = 256 << 20
"""Largest value of `max_body_bytes`: a frontend holds as much of all requests that are incomplete or wait to be decoded."""
MAX_INPUTS_CEILING = 4096
"""Largest value of `max_inputs`: each input of a request takes some microseconds of its frontend's event loop."""
MAX_PORT = 65535
AUTO: Final = "auto"
"""The service chooses the value by the machine."""
OFF: Final = "off"
"""The service does without it."""
LIMITS = "limits"
"""The table of the TOML file with the settings of ClientLimits."""
Positive = Annotated[int, Field(gt=0)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _device_list(text: str) -> str:
    """Validate auto, or a list of devices that names no GPU twice."""
    devices = text.split(",")
    if text != "auto" and not all(re.fullmatch(r"cpu|cuda:(0|[1-9][0-9]*)", device) for device in devices):
        raise ValueError("use auto, or the device of each engine, cpu or cuda:N, separated by commas without spaces")
    twice = {device for device in devices if device != "cpu" and devices.count(device) > 1}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))} is named twice: an engine uses a whole GPU, so name each GPU once")
    return text


def _auto_or_number(value: object) -> object:
    """Validate auto or a number above zero: pydantic would report an error for each of the two."""
    if value != AUTO and not re.fullmatch(r"[1-9][0-9]{0,3}", str(value)):
        raise ValueError("use auto, or a number from 1 to 9999")
    return value


def _off_or_port(value: object) -> object:
    """Validate off or a port number: pydantic would report an error for each of the two."""
    if value != OFF and not (re.fullmatch(r"[0-9]{1,5}", str(value)) and int(str(value)) <= MAX_PORT):
        raise ValueError(f"use off, or a port from 0 to {MAX_PORT}")
    return value


def _off_or_url(text: str) -> str:
    """Validate the URL of a receiver, or nothing."""
    if text and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", text):
        raise ValueError("use a URL such as http://127.0.0.1:4317, or leave it empty")
    return text


def _session_store(text: str) -> str:
    """Validate a folder, or the URL of a Redis server."""
    if "://" in text and not re.fullmatch(r"rediss?://\S+", text):
        raise ValueError("use the path of a folder, or a URL such as redis://127.0.0.1:6379/0")
    return text


def _policy(text: str) -> str:
    """Validate a rule that selects versions."""
    if not VERSIONS.fullmatch(text):
        raise ValueError("use all, latest, latest:2, or version numbers separated by commas without spaces")
    return text


class ClientLimits(BaseModel):
    """What clients may use at most: the table `[limits]` of the TOML file. Flags, variables and attributes know no tables."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_body_bytes: Annotated[int, Field(gt=0, le=BODY_CEILING_BYTES)] = 16 << 20
    """Largest request body."""
    max_inputs: Annotated[int, Field(gt=0, le=MAX_INPUTS_CEILING)] = 64
    """Most sequences in one request."""
    max_waiting: Positive = 1024
    """Most sequences that wait in the queue of one engine; further requests are refused."""
    max_sessions: Positive = 4096
    """Most open sessions of one engine; further sessions are refused. States without a slot on the device are kept on the host."""
    max_connections: Annotated[int, Field(ge=0)] = 0
    """Most connections of one frontend; 0 means as many as its limit of open files allows. Above it, idle connections are closed."""
    idle_seconds: PositiveSeconds = 15.0
    """How long an HTTP connection may wait for its next request before it is closed."""
    max_memory_share: Annotated[float, Field(gt=0.1, le=1)] = 0.95
    """Share of the container's memory limit in use from which all inference requests are refused. Large requests and new sessions are
    refused from 0.1 less. 1 means that none is refused, and the kernel may kill processes."""
    max_deadline_ms: Positive = 60_000
    """Longest deadline that a request may have."""


class Settings(ClientLimits):
    """All settings with their defaults."""

    host: str = "127.0.0.1"
    """Address on which the service listens."""
    port: Annotated[int, Field(ge=0, le=MAX_PORT)] = 8000
    """HTTP port; 0 takes a free port, which the ready line names."""
    grpc_port: Annotated[Literal["off"] | int, BeforeValidator(_off_or_port)] = 8001
    """gRPC port; 0 takes a free port, which the ready line names, and off is for no gRPC."""
    admin_port: Annotated[Literal["off"] | int, BeforeValidator(_off_or_port)] = OFF
    """Separate HTTP port for loading and unloading models, traces and metrics, which the other ports then lack; 0 takes a free port,
    which the ready line names."""
    health_port: Annotated[Literal["off"] | int, BeforeValidator(_off_or_port)] = OFF
    """Separate HTTP port, on the same address, that answers /healthz, /readyz and, without TLS, /metrics however busy the other ports
    are; 0 takes a free port, which the ready line names."""
    tls_cert: str = ""
    """PEM file of the certificate and its chain: both ports then speak TLS. Changed files are read within seconds."""
    tls_key: str = ""
    """PEM file of the certificate's key, if it is not in the same file."""
    tls_client_ca: str = ""
    """PEM file of the authority that signs the certificates of clients, which they then need."""
    keys: str = ""
    """TOML file of keys, which requests then need; empty for none. `seqserve key new` adds keys. Changes are read within seconds."""
    state_keys: str = ""
    """File of secrets, one on each line, that sign exported session states; empty for none. States without a signature are then refused.
    All replicas need the same file. `seqserve state-key new` adds a secret. Changes are read within seconds."""
    session_store: Annotated[str, AfterValidator(_session_store)] = ""
    """Where sessions are saved, from which they continue on any replica: a folder that all replicas share, or
    redis://HOST:PORT/DATABASE. Empty for none."""
    checkpoint_chunks: Positive = 10
    """Number of chunks after which a session is saved. A crash loses up to this number, and the chunks whose states wait to be saved."""
    insecure: bool = False
    """Serve everybody who reaches the port, administration included, without keys. An address that is not loopback needs this or
    keys."""
    allowed_hosts: str = ""
    """Names of this service that a Host header may have, besides those of loopback, separated by commas; * allows all. With keys, empty
    allows all too."""
    allowed_origins: str = ""
    """Origins of web pages that may use the service from a browser, such as https://example.com, separated by commas."""
    models: Path = EMBEDDED_MODELS
    """Folder of model folders: <name>/<version>/model.toml."""
    replicated: bool = False
    """Whether this service is one of several replicas behind a proxy or a balancer. Connections then get a maximum age, and no client can
    load or unload the models of this replica alone."""
    device: Annotated[str, AfterValidator(_device_list)] = "auto"
    """auto, or a list of cpu and cuda:N separated by commas. One engine per entry serves all models. auto takes the first GPU that
    works, otherwise the CPU."""
    frontends: Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_number)] = AUTO
    """Number of processes that parse and tokenise requests. auto chooses it by the cores that the service may use and its devices."""
    cache: Path = Path("~/.cache/seqserve")
    """Folder that keeps compiled kernels for the next start. If it is not writable, every start compiles again."""
    tf32: bool = False
    """Whether products of float32 models on a GPU may be computed in TF32, which is faster and has 11 significant bits instead of 24."""
    resident: bool = False
    """Whether a kernel stays on a GPU between the steps of a few live streams, which lowers their latency. Other requests then take longer:
    the kernel must end before them."""
    max_model_bytes: Annotated[int, Field(ge=0)] = 0
    """Largest size of weights and tables on one device, including versions that are being unloaded; 0 means no limit but the memory."""
    alias: str = ""
    """Another name of the model, if the models folder has only one; otherwise unused. Platforms that serve one model under a name of
    their own set it."""
    strict: bool = False
    """Whether a model that cannot be served ends the start. Otherwise the service starts with the other models and lists it as
    unavailable."""
    versions: Annotated[str, AfterValidator(_policy)] = "all"
    """Versions of each model to serve, unless its versions.toml has its own rule: all, latest, latest:N, or version numbers separated by
    commas."""
    reload: Literal["request", "poll", "off"] = "request"
    """When the service reads the models folder again: request (POST /v2/repository/models/{name}/load), poll (also every 5 s),
    or off (at the next start)."""

    max_batch_sequences: Positive = 64
    """Most sequences in one batch of an engine."""
    max_batch_tokens: Positive = 4096
    """Most time steps in one batch, over all sequences; a longer sequence that cannot be cut runs alone."""
    batch_budget_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Target duration of a batch. Long sequences are cut to meet it, so a new request waits for at most one such batch. 0 means 0.5 on
    a GPU and 5 on a CPU."""
    state_slots: Annotated[int, Field(ge=0)] = 0
    """Recurrent states per model that an engine keeps on its device between batches. 0 means as many as max_sessions, within 64 MiB
    or with 256 states."""
    session_idle_seconds: PositiveSeconds = 60.0
    """A session without a chunk for this time expires."""

    default_deadline_ms: Positive = 5_000
    """Deadline of a request that has none."""
    lame_duck_seconds: Seconds = 5.0
    """After SIGTERM: how long the service still accepts requests while /readyz already returns 503."""
    drain_seconds: PositiveSeconds = 30.0
    """After lame_duck_seconds: how long requests in flight may take."""
    start_seconds: PositiveSeconds = 120.0
    """Longest time that an engine may take to load and warm up before it is restarted."""
    page: bool = True
    """Whether browsers get a page about the service at /, with which people try its models."""
    trace_endpoint: Annotated[str, AfterValidator(_off_or_url)] = ""
    """URL of an OpenTelemetry receiver, such as http://127.0.0.1:4317, which gets traces of requests; empty for none."""
    trace_rate: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the requests without a traceparent that are traced. Errors and slow requests are always traced."""
    access_log_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the inference requests that have a line in the log; 0 for none. Slow and failed requests have one in any case."""
    slow_request_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """A request that takes longer is slow: it is logged, and traced if traces are sent. 0 means that no request is slow."""
    debug: bool = False
    """Whether any client may record batches with POST /debug/trace. Batches take longer while it records."""

    @property
    def written_models(self) -> Path:
        """The folder to which commands write models."""
        try:
            return self.models if "models" in self.model_fields_set else USER_MODELS.expanduser()
        except RuntimeError:
            raise SettingsError("this user has no home folder: name a folder of models with --models") from None

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each engine, in the order of the engines."""
        return tuple(self.device.split(","))

    @model_validator(mode="after")
    def _limits_fit_together(self) -> Settings:
        named = {"port": self.port, "grpc_port": 0 if self.grpc_port == OFF else self.grpc_port}
        named["admin_port"] = 0 if self.admin_port == OFF else self.admin_port
        named["health_port"] = 0 if self.health_port == OFF else self.health_port
        for (name, port), (other, other_port) in combinations(named.items(), 2):
            if port == other_port != 0:
                raise ValueError(f"{name} and {other} are both {port}: change one of them")
        if self.max_inputs > self.max_waiting:
            raise ValueError(f"max_inputs is {self.max_inputs} and max_waiting is {self.max_waiting}: raise max_waiting")
        if self.default_deadline_ms > self.max_deadline_ms:
            raise ValueError(
                f"default_deadline_ms is {self.default_deadline_ms} and max_deadline_ms is {self.max_deadline_ms}: "
                "lower the default or raise the maximum"
            )
        return self


Given = Mapping[str, tuple[str, Any]]
"""The source and the value of each setting that has one, by name."""


def load(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Return the settings of this start. Raises SettingsError, which names the setting, its source and the nearest known name."""
    return validated(gather(flags, environment))


def gather(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Given:
    """Return what flags, variables and the file set. Raises SettingsError for a file that cannot be read."""
    file = flags.get("config") or environment.get(CONFIG)
    values: dict[str, tuple[str, Any]] = {}
    if file:
        values |= _from_file(Path(file))
    for variable, value in environment.items():
        if variable.startswith(PREFIX) and variable not in NO_SETTINGS and not _is_service_link(variable, value):
            values[variable.removeprefix(PREFIX).lower()] = (variable, value)
    for name, value in flags.items():
        if name != "config" and value is not None:
            values[name] = (f"--{name.replace('_', '-')}", value)
    return values


def without_password(text: str) -> str:
    """Return a text that may have a URL without the user and the password in it."""
    return re.sub(r"(?<=://).*@", "***@", text)


def _is_service_link(variable: str, value: str) -> bool:
    """Return whether Kubernetes set a variable, as it does in pods for each Service with a name such as seqserve-grpc."""
    return bool(SERVICE_LINK.fullmatch(variable) or (variable.endswith("PORT") and LINKED_ADDRESS.match(value)))


def _from_file(file: Path) -> dict[str, tuple[str, Any]]:
    """Return the source and the value of each setting in a file. Raises SettingsError, also for a setting in the wrong table."""
    try:
        values = tomllib.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"settings file {file}: {error}") from error
    limits = values.pop(LIMITS, {})
    if not isinstance(limits, dict):
        raise SettingsError(f"{LIMITS} in {file} is {limits!r}: it is a table, which begins with a line [{LIMITS}]")
    for name in [name for name, value in values.items() if isinstance(value, dict)]:
        raise SettingsError(f"unknown table [{name}] in {file}: the only table is [{LIMITS}]")
    for name in values.keys() & ClientLimits.model_fields:
        raise SettingsError(f"{name} in {file} is a limit: move it below a line [{LIMITS}]")
    for name in limits.keys() & (Settings.model_fields.keys() - ClientLimits.model_fields):
        raise SettingsError(f"{LIMITS}.{name} in {file} is no limit: move it above the line [{LIMITS}]")
    in_limits = {name: (f"{LIMITS}.{name} in {file}", value) for name, value in limits.items()}
    return {name: (f"{name} in {file}", value) for name, value in values.items()} | in_limits


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that a mistyped one may stand for, or at all known names."""
    near = difflib.get_close_matches(name, known := list(known), n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def validated(values: Given) -> Settings:
    """Return the settings with these values, and the defaults of the others. Raises SettingsError."""
    for name, (source, _) in values.items():
        if name not in Settings.model_fields:
            raise SettingsError(f"unknown setting {source}: {nearest(name, Settings.model_fields)}")
    try:
        return Settings.model_validate({name: value for name, (_, value) in values.items()})
    except ValidationError as error:
        described = "; ".join(_describe(dict(detail), values) for detail in error.errors())
        raise SettingsError(without_password(described)) from None


def _describe(error: Mapping[str, Any], values: Given) -> str:
    """Return one sentence about a setting that failed validation."""
    name = str(error["loc"][0]) if error["loc"] else ""
    ours = error["type"] == "value_error"
    reason = str(error["msg"]).removeprefix("Value error, ") if ours else str(error["msg"]).lower()
    if name not in values:
        return reason
    source, value = values[name]
    return f"{source} is {value!r}: {reason}"


def as_toml(settings: Settings, given: Given) -> str:
    """Return all settings as a TOML file, each with its description, its default and its source. given: what `gather` returned."""
    described = {name: _as_toml(settings, given, name) for name in Settings.model_fields}
    limits = [described.pop(name) for name in ClientLimits.model_fields]
    return "\n\n".join([*described.values(), f"[{LIMITS}]", *limits])


def _as_toml(settings: Settings, given: Given, name: str) -> str:
    """Return a setting as lines of TOML. JSON writes its value in the same way."""
    field = Settings.model_fields[name]
    source, _ = given.get(name, ("default", None))
    value, default = (json.dumps(one, default=str, ensure_ascii=False) for one in (getattr(settings, name), field.default))
    comments = [*(field.description or "").splitlines(), f"Default: {default}. Set by: {source}."]
    return "\n".join([*(f"# {line}" for line in comments), f"{name} = {without_password(value)}"])
