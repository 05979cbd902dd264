"""Every knob of the service, said once. Read at the start from flags, `SEQSERVE_*` variables and a TOML file, in that order
of precedence, and passed down as plain values; an unknown name or an impossible value stops the start."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from service.errors import SettingsError

PREFIX = "SEQSERVE_"
CONFIG = "SEQSERVE_CONFIG"
"""The one variable that is no setting: it names the TOML file."""

VERSIONS = re.compile(r"all|latest(:[1-9][0-9]{0,3})?|[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*")
"""A rule by which versions of a model are chosen."""
Positive = Annotated[int, Field(gt=0)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _device_list(said: str) -> str:
    """auto, or a list of devices in which no GPU stands twice."""
    devices = said.split(",")
    if said != "auto" and not all(re.fullmatch(r"cpu|cuda:(0|[1-9][0-9]*)", device) for device in devices):
        raise ValueError("say auto, or name the device of each engine, cpu or cuda:N, with commas and no spaces between them")
    twice = {device for device in devices if device != "cpu" and devices.count(device) > 1}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))} is named twice: one engine has the whole of a GPU, so name each once")
    return said


def _policy(said: str) -> str:
    """As a rule by which versions are chosen."""
    if not VERSIONS.fullmatch(said):
        raise ValueError("say all, latest, latest:2, or the versions themselves with commas and no spaces between them")
    return said


class Settings(BaseModel):
    """All settings with their defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address on which the service listens."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """HTTP port; 0 takes a free one, which the ready line names."""
    grpc: bool = True
    """Whether gRPC is served beside HTTP."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 8001
    """gRPC port; 0 takes a free one, which the ready line names."""
    models: Path = Path(__file__).resolve().parent.parent / "models"
    """Folder of model folders: <name>/<version>/model.toml."""
    device: Annotated[str, AfterValidator(_device_list)] = "auto"
    """auto, or cpu and cuda:N with commas between them: on each of them an engine serves all models. auto takes the first GPU that
    works, else the CPU."""
    frontends: Positive = 1
    """Processes that parse and tokenise requests."""
    cache: Path = Path("~/.cache/seqserve")
    """Folder that keeps compiled kernels for the next start; where it cannot be written, every start compiles them."""
    fold_limit_bytes: Annotated[int, Field(ge=0)] = 256 << 20
    """Largest table, per model, that an embedding is folded into at load."""
    max_model_bytes: Annotated[int, Field(ge=0)] = 0
    """Most bytes of weights and tables on one device, those of versions that are on their way out included; 0 is what there is."""
    versions: Annotated[str, AfterValidator(_policy)] = "all"
    """Which versions of a model are served, unless its versions.toml says otherwise: all, latest, latest:N, or their numbers with commas
    between them."""
    reload: Literal["request", "poll", "off"] = "request"
    """When the models folder is looked at again: on request (POST /v2/repository/models/{name}/load), every poll_seconds as well, or not
    before the next start."""
    poll_seconds: PositiveSeconds = 5.0
    """How often, where reload is poll."""
    unload_seconds: Seconds = 30.0
    """How long sessions of a version that is no longer served may go on. Each of those that are left then gets one 409."""

    max_body_bytes: Positive = 16 << 20
    """Largest request body."""
    max_inputs: Positive = 64
    """Most sequences in one request."""
    max_waiting: Positive = 1024
    """Most sequences waiting for a turn of one engine; one more is refused."""
    max_batch_sequences: Positive = 64
    """Most sequences in one turn of an engine."""
    max_batch_tokens: Positive = 4096
    """Most steps, over all sequences, in one turn; a longer sequence runs alone."""
    batch_budget_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """How long a turn may take, by which long sequences are cut: whoever comes meanwhile waits for so long at most. 0 is 0.5 on a GPU and
    5 on a CPU."""
    batching: Literal["continuous", "static"] = "continuous"
    """static runs every sequence whole, in turns that none joins: only for comparisons."""
    state_slots: Positive = 256
    """States of each model that an engine keeps on its device from turn to turn."""
    max_sessions: Positive = 4096
    """Most open sessions of one engine; one more is refused. Those that find no slot are kept on the host."""
    session_idle_seconds: PositiveSeconds = 60.0
    """A session of which no chunk comes for so long has ended."""
    max_state_bytes: Positive = 16 << 20
    """Largest state of a session that PUT /sessions/{id}/state takes."""
    channel_bytes: Positive = 64 << 20
    """Most bytes of unanswered requests between one front and one engine; one more is refused."""

    default_deadline_ms: Positive = 5_000
    """Deadline of a request that names none."""
    max_deadline_ms: Positive = 60_000
    """Longest deadline that a request may name."""
    lame_duck_seconds: Seconds = 5.0
    """After SIGTERM: how long the service still accepts requests while it already says that it is not ready."""
    drain_seconds: PositiveSeconds = 30.0
    """After that: how long requests in flight may take."""
    start_seconds: PositiveSeconds = 120.0
    """Longest an engine may take to load and warm up before it is replaced."""
    debug: bool = False
    """Whether POST /debug/trace records turns for whoever asks; while it does, turns take longer."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each engine, in the order of their places."""
        return tuple(self.device.split(","))

    @model_validator(mode="after")
    def _limits_fit_together(self) -> Settings:
        if self.grpc and self.grpc_port == self.port != 0:
            raise ValueError(f"port and grpc_port are both {self.port}: choose another for one of them")
        if self.max_inputs > self.max_waiting:
            raise ValueError(f"max_inputs is {self.max_inputs} and max_waiting is {self.max_waiting}: raise max_waiting")
        if self.default_deadline_ms > self.max_deadline_ms:
            raise ValueError(
                f"default_deadline_ms is {self.default_deadline_ms} and max_deadline_ms is {self.max_deadline_ms}: "
                "lower the default or raise the maximum"
            )
        if self.max_body_bytes * 2 > self.channel_bytes:
            # The densest JSON, one digit and a comma per token, doubles on its way to int32.
            raise ValueError(
                f"channel_bytes is {self.channel_bytes} and max_body_bytes is {self.max_body_bytes}: "
                "channel_bytes must be at least twice max_body_bytes"
            )
        return self


def load(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """The settings of this start; raises SettingsError naming the knob, its source and the nearest known name."""
    file = flags.get("config") or environment.get(CONFIG)
    said: dict[str, tuple[str, Any]] = {}
    for name, value in (_from_file(Path(file)) if file else {}).items():
        said[name] = (f"{name} in {file}", value)
    for variable, value in environment.items():
        if variable.startswith(PREFIX) and variable != CONFIG:
            said[variable.removeprefix(PREFIX).lower()] = (variable, value)
    for name, value in flags.items():
        if name != "config" and value is not None:
            said[name] = (f"--{name.replace('_', '-')}", value)
    return _validated(said)


def _from_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise SettingsError(f"settings file {file}: {fault}") from fault


def _validated(said: Mapping[str, tuple[str, Any]]) -> Settings:
    for name, (source, _) in said.items():
        if name not in Settings.model_fields:
            near = difflib.get_close_matches(name, Settings.model_fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(Settings.model_fields)}"
            raise SettingsError(f"unknown setting {source}: {hint}")
    try:
        return Settings.model_validate({name: value for name, (_, value) in said.items()})
    except ValidationError as fault:
        raise SettingsError("; ".join(_complaint(dict(error), said) for error in fault.errors())) from fault


def _complaint(error: Mapping[str, Any], said: Mapping[str, tuple[str, Any]]) -> str:
    name = str(error["loc"][0]) if error["loc"] else ""
    ours = error["type"] == "value_error"
    reason = str(error["msg"]).removeprefix("Value error, ") if ours else str(error["msg"]).lower()
    if name not in said:
        return reason
    source, value = said[name]
    return f"{source} is {value!r}: {reason}"
