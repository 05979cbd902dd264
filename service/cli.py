"""`seqserve serve | infer | models | bench`: reads the settings, then hands over."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from service import __version__
from service.errors import ServiceError, SettingsError, StartError
from service.ipc.messages import Manifest
from service.log import Log
from service.modeling import spec
from service.settings import Settings, load
from service.supervisor.supervisor import Supervisor

EXAMPLE = "How far is it from Denver to Aspen ?"
T = TypeVar("T", int, float)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's exit status: 0 done, 1 the service cannot start, 2 the command line or a setting is wrong."""
    said = vars(_parser().parse_args(arguments))
    run = said.pop("run")
    words = {name: said.pop(name) for name in list(said) if name not in Settings.model_fields and name != "config"}
    try:
        settings = load(said, os.environ)
        status: int = run(settings, **words)
    except (StartError, ServiceError) as fault:
        print(f"seqserve: {fault}", file=sys.stderr)
        return 2 if isinstance(fault, SettingsError) else 1
    return status


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or an interrupt."""
    started = time.monotonic()

    def announce(http: str, grpc: str | None) -> None:
        address = f"http://{http}"
        also = f" and for gRPC on {grpc}" if grpc else ""
        print(f"seqserve is ready on {address}{also} after {time.monotonic() - started:.1f} s. Ask it:\n")
        print(f"curl -s {address}/infer -H 'Content-Type: application/json' -d '{body}'\n", flush=True)

    supervisor = Supervisor(settings, Log("supervisor"), announce)
    body = json.dumps(_example(supervisor.manifest))
    supervisor.serve()
    return 0


def infer(settings: Settings, model: str, texts: list[str]) -> int:
    """Answer texts without a server, one JSON object a line."""
    # Imported here: it loads torch, and the supervisor never does.
    from service import local

    for output in local.infer(settings, model, texts):
        print(json.dumps(output))
    return 0


def models(settings: Settings) -> int:
    """List what the models folder holds."""
    catalog = {
        name: {version: spec.read(folder) for version, folder in versions.items()}
        for name, versions in spec.find(settings.models).items()
    }
    for alias, name in spec.aliases(settings.models, catalog).items():
        print(f"{alias}  alias of {name}")
    for name, versions in catalog.items():
        for version, model in versions.items():
            layers = " > ".join(layer.kind for layer in model.layers)
            print(f"{name}  version {version}  {model.input.kind} > {layers} > {model.head.kind}  {model.precision}")
            if model.description:
                print(f"    {model.description}")
    return 0


def bench(settings: Settings, url: str, json: Path | None, trace: Path | None, **load: Any) -> int:
    """Load a running server, with what the flags say of the load, and say what came of it."""
    from loadtest.bench import Plan, run
    from loadtest.discovery import NoServer
    from loadtest.tracing import NoTrace

    try:
        return run(Plan(url=url.rstrip("/"), **load), settings.models, json, trace)
    except (NoServer, NoTrace, ValueError, OSError) as fault:
        raise StartError(str(fault)) from fault


def _example(manifest: Manifest) -> dict[str, Any]:
    """A request that the first alias or model answers, one over text if there is any."""
    newest = {model_version.name: model_version.spec for model_version in manifest.model_versions}
    meant = {
        f"{model_version.name}/{model_version.version}": model_version.spec for model_version in manifest.model_versions
    } | newest
    names = {alias: meant[other] for alias, other in manifest.aliases.items()} | newest
    models = {name: spec.ModelSpec.model_validate_json(said) for name, said in names.items()}
    name, model = min(models.items(), key=lambda one: one[1].input.kind != "text")
    step: list[float] = [0.0] * (model.input.features or 0)
    inputs = {"text": EXAMPLE, "ids": [0] * model.min_steps, "features": [step] * model.min_steps}
    return {"model": name, "inputs": [inputs[model.input.kind]]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="seqserve", description="A server for sequence models.")
    parser.add_argument("--version", action="version", version=f"seqserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="serve | infer | models | bench")
    shared = argparse.ArgumentParser(add_help=False)
    _setting(shared, "--models", metavar="DIR", help="folder of models")
    _setting(shared, "--config", metavar="FILE", help="TOML file of settings")
    one = commands.add_parser("serve", parents=[shared], help="answer requests until SIGTERM")
    _setting(one, "--host", help="address to listen on")
    _setting(one, "--port", help="HTTP port; 0 takes a free one")
    _setting(one, "--grpc-port", metavar="PORT", help="gRPC port; 0 takes a free one")
    _setting(one, "--device", metavar="auto|cpu|cuda:N,...", help="where models run: an engine for each device named")
    _setting(one, "--frontends", metavar="N", help="processes that parse requests")
    _setting(one, "--debug", action="store_true", help="let callers of POST /debug/trace record turns")
    one.set_defaults(run=serve)
    one = commands.add_parser("infer", parents=[shared], help="answer texts without a server")
    _setting(one, "--device", metavar="auto|cpu|cuda:N", help="where the model runs")
    one.add_argument("--model", required=True, metavar="NAME")
    one.add_argument("texts", nargs="+", metavar="TEXT")
    one.set_defaults(run=infer)
    one = commands.add_parser("models", parents=[shared], help="list the models folder")
    one.set_defaults(run=models)
    one = commands.add_parser("bench", parents=[shared], help="load a running server and say what came of it")
    one.add_argument("--url", default="http://127.0.0.1:8000", help="the server, %(default)s unless given")
    one.add_argument("--model", metavar="NAME", help="the first one served unless given")
    levels = one.add_mutually_exclusive_group()
    levels.add_argument(
        "--callers",
        type=_listed(int),
        default=[1, 8, 32, 128],
        metavar="N,N",
        help="levels of callers who wait for each answer before they ask again; 1,8,32,128 unless given",
    )
    levels.add_argument(
        "--rates", type=_listed(float), default=[], metavar="R,R", help="levels of requests a second that wait for nothing"
    )
    one.add_argument("--arrivals", choices=("poisson", "bursty"), default="poisson", help="how such requests come")
    one.add_argument("--seconds", type=_above_zero(float), default=5.0, help="of each level, %(default)s unless given")
    one.add_argument("--inputs", type=_above_zero(int), default=1, help="sequences in a request, %(default)s unless given")
    one.add_argument("--seed", type=int, default=0, help="of the traffic, %(default)s unless given")
    one.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures, one JSON object a level")
    one.add_argument("--trace", type=Path, metavar="FILE", help="where to write turns of the last level, for ui.perfetto.dev")
    one.set_defaults(run=bench)
    return parser


def _above_zero(kind: type[T]) -> Callable[[str], T]:
    """Reads a number above zero."""

    def read(word: str) -> T:
        try:
            number = kind(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word!r} is no number above zero") from None
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{word!r} is no number above zero")
        return number

    return read


def _listed(kind: type[T]) -> Callable[[str], list[T]]:
    """Reads numbers above zero with commas between them."""

    def read(word: str) -> list[T]:
        return [_above_zero(kind)(part) for part in word.split(",")]

    return read


def _setting(parser: argparse.ArgumentParser, flag: str, **words: Any) -> None:
    """A flag that overrides a setting; its default and its checks are the setting's."""
    parser.add_argument(flag, default=None, **words)
