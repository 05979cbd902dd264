"""`seqserve serve | infer | models`: reads the settings, then hands over."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from service import __version__, app
from service.errors import ServiceError, SettingsError, StartError
from service.logs import Log
from service.settings import Settings, load
from service.supervisor import Supervisor
from service.zoo import spec

EXAMPLE = "How far is it from Denver to Aspen ?"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's exit status: 0 done, 1 the service cannot start, 2 the command line or a setting is wrong."""
    said = vars(_parser().parse_args(arguments))
    run, words = said.pop("run"), {key: said.pop(key) for key in ("model", "texts") if key in said}
    try:
        settings = load(said, os.environ)
        status: int = run(settings, **words)
    except (StartError, ServiceError) as fault:
        print(f"seqserve: {fault}", file=sys.stderr)
        return 2 if isinstance(fault, SettingsError) else 1
    return status


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or an interrupt."""
    body = json.dumps(_example(settings))
    started = time.monotonic()

    def announce(host: str, port: int) -> None:
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"seqserve is ready on {address} after {time.monotonic() - started:.1f} s. Ask it:\n")
        print(f"curl -s {address}/infer -H 'Content-Type: application/json' -d '{body}'\n", flush=True)

    Supervisor(settings, Log("supervisor"), announce).serve()
    return 0


def infer(settings: Settings, model: str, texts: list[str]) -> int:
    """Answer texts without a server, one JSON object a line."""
    for output in app.answer(settings, model, texts):
        print(json.dumps(output))
    return 0


def models(settings: Settings) -> int:
    """List what the models folder holds."""
    catalog = app.catalog(settings.models)
    for alias, name in spec.aliases(settings.models, catalog).items():
        print(f"{alias}  alias of {name}")
    for name, versions in catalog.items():
        for version, (_, model) in versions.items():
            layers = " > ".join(layer.kind for layer in model.layers)
            print(f"{name}  version {version}  {model.input.kind} > {layers} > {model.head.kind}  {model.precision}")
            if model.description:
                print(f"    {model.description}")
    return 0


def _example(settings: Settings) -> dict[str, Any]:
    """A request that the first alias or model answers, one over text if there is any."""
    catalog = app.catalog(settings.models)
    names = {alias: catalog[name] for alias, name in spec.aliases(settings.models, catalog).items()} | catalog
    newest = {name: list(versions.values())[-1][1] for name, versions in names.items()}
    name, model = min(newest.items(), key=lambda one: one[1].input.kind != "text")
    step: list[float] = [0.0] * (model.input.features or 0)
    inputs = {"text": EXAMPLE, "ids": [0] * model.min_steps, "features": [step] * model.min_steps}
    return {"model": name, "inputs": [inputs[model.input.kind]]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="seqserve", description="A server for sequence models.")
    parser.add_argument("--version", action="version", version=f"seqserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="serve | infer | models")
    shared = argparse.ArgumentParser(add_help=False)
    _setting(shared, "--models", metavar="DIR", help="folder of models")
    _setting(shared, "--config", metavar="FILE", help="TOML file of settings")
    one = commands.add_parser("serve", parents=[shared], help="answer requests until SIGTERM")
    _setting(one, "--host", help="address to listen on")
    _setting(one, "--port", help="HTTP port; 0 takes a free one")
    _setting(one, "--device", metavar="auto|cpu|cuda:N", help="where models run")
    _setting(one, "--fronts", metavar="N", help="processes that parse requests")
    one.set_defaults(run=serve)
    one = commands.add_parser("infer", parents=[shared], help="answer texts without a server")
    _setting(one, "--device", metavar="auto|cpu|cuda:N", help="where the model runs")
    one.add_argument("--model", required=True, metavar="NAME")
    one.add_argument("texts", nargs="+", metavar="TEXT")
    one.set_defaults(run=infer)
    one = commands.add_parser("models", parents=[shared], help="list the models folder")
    one.set_defaults(run=models)
    return parser


def _setting(parser: argparse.ArgumentParser, flag: str, **words: Any) -> None:
    """A flag that overrides a setting; its default and its checks are the setting's."""
    parser.add_argument(flag, default=None, **words)
