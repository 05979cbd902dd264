"""`seqserve export`: a model folder becomes a checkpoint of another framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from service.errors import ModelError
from service.exporters import pytorch
from service.exporters.formats import SUFFIXES
from service.exporters.model import Export, ExportRefused, Model
from service.modeling import spec, store
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Request:
    """A model version to export. model: its name; format: a key of `formats.SUFFIXES`; out: the file to write; version:
    None for the newest."""

    model: str
    format: str
    out: Path
    version: int | None = None


def export_model(settings: Settings, request: Request, say: Callable[[str], None]) -> None:
    """Write a checkpoint, its recipe and, for texts, the tokenizer. say: receives each line of the report.

    Raises ModelError for a model that does not exist, or that the format cannot express. Then nothing is written.
    """
    if request.out.suffix not in SUFFIXES[request.format]:
        raise ExportRefused(
            f"{request.out} is no name of a file for {request.format}: let it end in {' or '.join(SUFFIXES[request.format])}"
        )
    folder = store.find_version(settings.models, request.model, request.version)
    described = spec.read(folder, request.model)
    export = _export(Model(described, store.read_arrays(folder, described)), request)
    files = {request.out: export.content, Path(f"{request.out}.toml"): store.toml(export.recipe).encode()}
    if described.input.kind == "text":
        files[Path(f"{request.out}.tokenizer.json")] = spec.read_verified(folder / spec.TOKENIZER, described)
    for note in _notes(described, export):
        say(f"note: {note}")
    for file, content in files.items():
        try:
            file.write_bytes(content)
        except OSError as error:
            raise ModelError(f"{file} cannot be written: {error.strerror}") from error
        say(f"{file} is complete.")
    say(f"Read it back: {_import_command(request, described)}")


def _export(model: Model, request: Request) -> Export:
    if request.format == "pytorch":
        return pytorch.export(model, request.out.suffix)
    try:
        from service.exporters import onnx  # imports a package of the extra `import`
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise ExportRefused("the package onnx is missing: install seqserve[import]") from error
    return onnx.export(model)


def _notes(described: spec.ModelSpec, export: Export) -> list[str]:
    whole = "its int8 matrices are written as float32, each number times its scale"
    return [whole, *export.notes] if described.precision == "int8" else export.notes


def _import_command(request: Request, described: spec.ModelSpec) -> str:
    tokenizer = f" --tokenizer {request.out}.tokenizer.json" if described.input.kind == "text" else ""
    return f"seqserve import {request.out} --name {described.name} --recipe {request.out}.toml{tokenizer}"
