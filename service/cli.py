"""The commands of `seqserve`, such as `seqserve serve`: parse flags, read settings, run."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from service import __version__
from service.access import keys, state_keys
from service.access.policy import check_start
from service.access.scopes import KEY_SCOPES, Scope
from service.client_access import ClientAccess
from service.errors import ServiceError, SettingsError, StartError
from service.exporters import SUFFIXES
from service.flags import Parser, above_zero, add_settings, listed
from service.frontend.http1.tls import build_context
from service.importers.formats import FORMATS, LAYER_TABLES
from service.ipc.messages.models import Manifest
from service.log import Log
from service.modeling import spec
from service.modeling.spec.files import confined
from service.settings import CLIENT_KEY, CONFIG, USER_MODELS, Given, Settings, as_toml, gather, validated
from service.supervisor.ports import Addresses
from service.supervisor.repository import Repository
from service.supervisor.supervisor import Supervisor

EXAMPLE = "This is a text."
ADDRESS = "http://127.0.0.1:8000"
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
NUMBER: dict[str, Any] = {"type": int, "default": 0, "metavar": "N"}
"""Options of flags with such a value."""
KEY_LIMITS = {
    "max_requests_per_second": "requests in a second",
    "max_bytes_per_second": "bytes of values in a second",
    "max_sequences_in_flight": "sequences without an answer",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 success, 1 an error, 2 a wrong or missing flag or setting."""
    flags = vars(_parser().parse_args(arguments))
    run = flags.pop("run")
    options = {name: flags.pop(name) for name in list(flags) if name not in Settings.model_fields and name != "config"}
    try:
        given = gather(flags, os.environ)
        settings = validated(given)
        status: int = print_settings(settings, given) if run is print_settings else run(settings, **options)
    except (StartError, ServiceError, PermissionError) as error:
        say(f"seqserve: {error}", sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    return status


def say(text: str, file: TextIO | None = None) -> None:
    """Print a text with control characters as escapes, as in the log: names in folders and checkpoints may have them."""
    print("".join(one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text), file=file)


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or an interrupt."""
    started = time.monotonic()

    def announce(addresses: Addresses) -> None:
        scheme = "https" if settings.tls_cert else "http"
        address = f"{scheme}://{addresses.http}"
        others = f" and for gRPC on {addresses.grpc}" if addresses.grpc else ""
        others += f" and for administration on {scheme}://{addresses.admin}" if addresses.admin else ""
        others += f" and for health on http://{addresses.health}" if addresses.health else ""
        print(f"seqserve is ready on {address}{others} after {time.monotonic() - started:.1f} s. Try it:\n")
        print(f"{_curl(address, settings, supervisor.manifest)}\n", flush=True)

    check_start(settings)
    state_keys.StateKeys(settings)
    build_context(settings)
    with confined(settings.models):
        supervisor = Supervisor(settings, Log("supervisor"), announce)
        supervisor.serve()
    return 0


def infer(settings: Settings, model: str, texts: list[str], npz: Path | None, out: Path | None) -> int:
    """Run a model in this process: print one JSON object per text, or write every output for the arrays of a file to another file."""
    # Imported here because it loads torch, which the supervisor never needs.
    from service import local

    if npz is None and texts and out is None:
        for output in local.infer(settings, model, texts):
            print(json.dumps(output))
    elif npz is None or out is None or texts:
        raise StartError("infer takes texts, or --npz FILE with --out FILE: name one of them")
    else:
        for name, array in local.infer_arrays(settings, model, npz, out).items():
            print(f"{name}  {' x '.join(map(str, array.shape))}  {array.dtype}")
    return 0


def import_checkpoint(settings: Settings, **request: Any) -> int:
    """Turn a foreign checkpoint into a version of a model, and print what was found and compared."""
    from service.importers.command import ImportRequest, import_model  # imports torch

    import_model(settings, ImportRequest(**request), say)
    return 0


class _ListLayers(argparse.Action):
    """Prints the layers or operators of a format that can be imported, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        from service.importers.command import known_layers  # imports torch

        try:
            print(*known_layers(values), sep="\n")
        except StartError as error:
            parser.exit(1, f"seqserve: {error}\n")
        parser.exit()


def export_checkpoint(settings: Settings, model: str, model_version: int | None, format: str, out: Path) -> int:
    """Write a version of a model as a foreign checkpoint."""
    from service.exporters.command import export_model  # imports torch

    export_model(settings, model, model_version, format, out, say)
    return 0


def models(settings: Settings) -> int:
    """List the models folder."""
    manifest = Repository(settings.models).readable_manifest("all")
    for alias, name in manifest.aliases.items():
        say(f"{alias}  alias of {name}")
    for found in manifest.model_versions:
        model = spec.ModelSpec.model_validate_json(found.spec)
        layers = " > ".join(layer.kind for layer in model.layers)
        say(f"{found.name}  version {found.version}  {model.input.kind} > {layers} > {model.head.kind}  {model.precision}")
        if model.description:
            say(f"    {model.description}")
    for entry in manifest.unavailable:
        say(f"seqserve: {entry.reason}", sys.stderr)
    return 1 if manifest.unavailable else 0


def compress(
    settings: Settings, model: str, precision: str, data: Path | None, model_version: int | None, name: str | None
) -> int:
    """Write a smaller version of a model and print what that changes."""
    from service import compress  # imports torch

    folder, section = compress.compress(settings, model, precision, version=model_version, name=name, data=data)
    say(f"{folder} is complete. Its card says:\n\n{section}".rstrip())
    return 0


def print_settings(settings: Settings, given: Given) -> int:
    """Print all settings with their values, defaults and sources."""
    print(as_toml(settings, given))
    return 0


def new_key(
    settings: Settings, name: str, scopes: list[Scope], tenant: str | None, tenant_sessions: int, **limits: float
) -> int:
    """Add a key to the key file and print it: the file has only its hash. limits: see `keys.create`."""
    if not settings.keys:
        raise SettingsError("no key file is named: add --keys FILE, or set SEQSERVE_KEYS")
    token = keys.create(Path(settings.keys), name, scopes, tenant or name, max_sessions=tenant_sessions, **limits)
    print(f"{token}\n")
    print(
        f"This is the key {name}. It is shown only now: {settings.keys} has its hash. Send it as Authorization: Bearer {token}"
    )
    return 0


def new_state_key(settings: Settings) -> int:
    """Add a secret to the file of state keys."""
    if not settings.state_keys:
        raise SettingsError("no file of state keys is named: add --state-keys FILE, or set SEQSERVE_STATE_KEYS")
    file = settings.state_keys
    count = state_keys.create(Path(file))
    print(f"{file} has a new secret" + (f", the last of {count}" if count > 1 else "") + ". Give this file to all replicas.")
    if count > 1:
        print("Move the secret to the first line when all replicas know it: the first signs.")
    return 0


def bench(
    settings: Settings, url: str, key_file: Path | None, ca: Path | None, json: Path | None, trace: Path | None, **load: Any
) -> int:
    """Send load to a running server and print what it measured."""
    access = ClientAccess.read(key_file, ca)
    _find_load_generator()
    from loadtest import bench
    from loadtest.discovery import CannotMeasure

    try:
        plan = bench.Plan(url=url.rstrip("/"), access=access, **load)
        if plan.realtime is None:
            return bench.run(plan, settings.models, json, trace)
        from loadtest import realtime  # it loads torch

        return realtime.run(plan, json)
    except (CannotMeasure, ValueError, OSError) as error:
        raise StartError(str(error)) from error


def _find_load_generator() -> None:
    """Make `loadtest` importable. The repository has it at its top level, the wheel inside this package."""
    if "loadtest" not in sys.modules and importlib.util.find_spec("service.loadtest") is not None:
        sys.modules["loadtest"] = importlib.import_module("service.loadtest")


def _curl(address: str, settings: Settings, manifest: Manifest) -> str:
    """Return a command that sends a request for the first model."""
    key = f' -H "Authorization: Bearer ${CLIENT_KEY}"' if settings.keys else ""
    body = shlex.quote(json.dumps(_example(manifest)))
    return f"curl -s {address}/infer -H 'Content-Type: application/json'{key} -d {body}"


def _example(manifest: Manifest) -> dict[str, Any]:
    """Return a request for the first text model or alias, or for the first model if none takes text."""
    newest = {model_version.name: model_version.spec for model_version in manifest.model_versions}
    specs = {
        f"{model_version.name}/{model_version.version}": model_version.spec for model_version in manifest.model_versions
    } | newest
    names = {alias: specs[target] for alias, target in manifest.aliases.items() if target in specs} | newest
    models = {name: spec.ModelSpec.model_validate_json(text) for name, text in names.items()}
    name, model = min(models.items(), key=lambda pair: pair[1].input.kind != "text")
    step: list[float] = [0.0] * (model.input.features or 0)
    inputs = {"text": model.input.example or EXAMPLE, "ids": [0] * model.min_steps, "features": [step] * model.min_steps}
    return {"model": name, "inputs": [inputs[model.input.kind]]}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="seqserve", description="A server for sequence models.")
    parser.add_argument("--version", action="version", version=f"seqserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = Parser(add_help=False)
    add_settings(shared, models="DIR")
    writing = Parser(add_help=False)
    writing.add_argument("--models", metavar="DIR", help=f"folder of models, to which it is written (default: {USER_MODELS})")
    for parser_of_files in (shared, writing):
        parser_of_files.add_argument("--config", metavar="FILE", help=f"TOML file of settings (default: {CONFIG})")
    source = Parser(add_help=False)
    source.add_argument("model", metavar="MODEL", help="name or alias of a model in the models folder")
    source.add_argument(
        "--version", dest="model_version", type=above_zero(int), metavar="N", help="version to read (default: the newest)"
    )
    command = commands.add_parser(
        "serve", parents=[shared], help="serve models until SIGTERM", epilog="`seqserve settings` prints the other settings."
    )
    add_settings(
        command,
        host="HOST",
        port="PORT",
        **dict.fromkeys(("grpc_port", "admin_port", "health_port"), "off|PORT"),
        device="auto|cpu|cuda:N,...",
        frontends="auto|N",
        session_store="WHERE",
        **dict.fromkeys(("keys", "state_keys", "tls_cert", "tls_key", "tls_client_ca"), "FILE"),
        alias="NAME",
        allowed_hosts="NAME,NAME",
        **dict.fromkeys(("strict", "insecure", "debug")),
    )
    command.set_defaults(run=serve)
    command = commands.add_parser("infer", parents=[shared], help="run a model on texts or on arrays, without a server")
    add_settings(command, device="auto|cpu|cuda:N")
    command.add_argument(
        "--model", required=True, metavar="NAME|DIR", help="name of a model, or a version folder if --npz names arrays"
    )
    command.add_argument("--npz", **FILE, help="arrays of sequences, and of initial states")
    command.add_argument("--out", **FILE, help="file for the outputs of --npz and the final states")
    command.add_argument("texts", nargs="*", metavar="TEXT")
    command.set_defaults(run=infer)
    command = commands.add_parser(
        "import", parents=[writing], help="turn a checkpoint of another framework into a model, and compare the outputs"
    )
    command.add_argument("checkpoint", **FILE, help="checkpoint to read; nothing in it is executed")
    command.add_argument("--name", required=True, metavar="NAME", help="name of the model; its next version is written")
    command.add_argument("--format", choices=FORMATS, help="format of the checkpoint (default: by the name of the file)")
    command.add_argument("--recipe", **FILE, help="TOML file of what the checkpoint does not say")
    command.add_argument(
        "--weights", metavar="NAME,NAME", help="dictionary with the weights, or several with parts of the model"
    )
    command.add_argument("--tokenizer", **FILE, help="tokenizer.json of a model for texts")
    command.add_argument("--labels", **FILE, help="text file with a label in each line")
    command.add_argument("--max-steps", type=above_zero(int), metavar="N", help="longest sequence")
    command.add_argument("--check", **FILE, help=".npz of sample inputs and the outputs of the source")
    command.add_argument("--assume", action="store_true", help="take what the checkpoint lacks as most models have it")
    command.add_argument(
        "--tolerance", type=above_zero(float), default=1e-5, metavar="T", help="largest difference from the source's outputs"
    )
    command.add_argument(
        "--layers",
        action=_ListLayers,
        choices=LAYER_TABLES,
        default=argparse.SUPPRESS,
        help="list what can be imported of a format",
    )
    command.set_defaults(run=import_checkpoint)
    command = commands.add_parser(
        "export",
        parents=[shared, source],
        help="write a model as a checkpoint of another framework, with a recipe to import it",
    )
    command.add_argument("--format", required=True, choices=SUFFIXES, help="format of the checkpoint")
    command.add_argument("--out", **FILE, required=True, help="file to write; FILE.toml is the recipe that --recipe takes")
    command.set_defaults(run=export_checkpoint)
    command = commands.add_parser("models", parents=[shared], help="list the models folder")
    command.set_defaults(run=models)
    command = commands.add_parser(
        "compress",
        parents=[writing, source],
        help="make a model smaller without training, as a new version, and measure what that changes",
    )
    command.add_argument(
        "--precision", required=True, choices=("int8", "bfloat16", "float16"), help="precision of the new version"
    )
    command.add_argument(
        "--data",
        **FILE,
        help="lines of a label and a text, to measure the accuracy of a text classifier (default: random inputs)",
    )
    command.add_argument("--name", metavar="NEW", help="write version 1 of a new model (default: the next version of MODEL)")
    command.set_defaults(run=compress)
    command = commands.add_parser(
        "settings", parents=[shared], help="print all settings with value, default and source, as a file for --config"
    )
    command.set_defaults(run=print_settings)
    key_commands = commands.add_parser("key", help="create keys").add_subparsers(required=True, metavar="new")
    command = key_commands.add_parser("new", parents=[shared], help="add a key to the key file and print it once")
    command.add_argument("name", metavar="NAME", help="name of the key, for the log")
    add_settings(command, keys="FILE")
    command.add_argument(
        "--scopes",
        type=_scopes,
        default="infer,session",
        metavar="SCOPE,SCOPE",
        help=f"what it allows, of {', '.join(KEY_SCOPES)}",
    )
    command.add_argument(
        "--tenant", metavar="TENANT", help="keys of one tenant see the same sessions (default: the key's name)"
    )
    command.add_argument("--max-priority", **NUMBER, help="highest priority of its requests")
    command.add_argument(
        "--max-sessions",
        dest="tenant_sessions",
        **NUMBER,
        help="most open sessions of its tenant in an engine; 0 for no own limit",
    )
    command.add_argument(
        "--weight",
        type=float,
        default=1.0,
        metavar="W",
        help="weight of its tenant where tenants compete; all its keys have the same",
    )
    for limit, what in KEY_LIMITS.items():
        command.add_argument(f"--{limit.replace('_', '-')}", **NUMBER, help=f"most {what}; 0 for no limit")
    command.set_defaults(run=new_key)
    state_key_commands = commands.add_parser("state-key", help="create secrets that sign exported session states")
    command = state_key_commands.add_subparsers(required=True, metavar="new").add_parser(
        "new", parents=[shared], help="add a secret to the file of state keys"
    )
    add_settings(command, state_keys="FILE")
    command.set_defaults(run=new_state_key)

    command = commands.add_parser(
        "bench", parents=[shared], help="send load to a running server and report latency and throughput"
    )
    command.add_argument("--url", default=ADDRESS, help="address of the server")
    command.add_argument("--key-file", **FILE, help=f"file with the key to send (default: {CLIENT_KEY})")
    command.add_argument("--ca", **FILE, help="authority of the server's certificate (default: the system's authorities)")
    command.add_argument("--model", metavar="NAME", help="model to send requests to (default: the first that is served)")
    levels = command.add_mutually_exclusive_group()
    levels.add_argument(
        "--callers",
        type=listed(int),
        default=[],
        metavar="N,N",
        help="closed loop: clients that wait for a reply before they send again",
    )
    levels.add_argument(
        "--rates",
        type=listed(float),
        default=[],
        metavar="R,R",
        help="open loop: requests per second (default: shares of the largest)",
    )
    levels.add_argument(
        "--realtime",
        type=above_zero(int),
        metavar="N",
        help="live streams: sessions over WebSockets that send a chunk each period",
    )
    command.add_argument("--steps", type=above_zero(int), default=1, help="time steps of a chunk of a live stream")
    command.add_argument("--period-ms", type=above_zero(float), default=200.0, help="milliseconds between its chunks")
    command.add_argument(
        "--find", action="store_true", help="find the most live streams with a p99 below the period, from N on"
    )
    command.add_argument(
        "--arrivals", choices=("poisson", "bursty"), default="poisson", help="how an open loop spaces requests"
    )
    command.add_argument("--seconds", type=above_zero(float), default=5.0, help="duration of each level")
    command.add_argument("--inputs", type=above_zero(int), default=1, help="sequences per request")
    command.add_argument(
        "--generators", type=above_zero(int), metavar="N", help="processes that send the load (default: as many as it needs)"
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the traffic")
    command.add_argument("--json", **FILE, help="write the results to this file, one JSON object per level")
    command.add_argument("--trace", **FILE, help="write the batches of the last level to this file, for ui.perfetto.dev")
    command.set_defaults(run=bench)
    return parser


def _scopes(words: str) -> list[Scope]:
    """Parse scopes of keys, separated by commas."""
    unknown = [word for word in words.split(",") if word not in KEY_SCOPES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a scope: choose from {', '.join(KEY_SCOPES)}")
    return [Scope(word) for word in words.split(",")]
