"""`seqserve export`: a model folder becomes a checkpoint of another framework."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from service.exporters import SUFFIXES, pytorch
from service.exporters.model import Export, ExportRefused, Model
from service.modeling import spec, store
from service.modeling.spec.files import replacing
from service.settings import Settings


def export_model(
    settings: Settings, model: str, version: int | None, format: str, out: Path, say: Callable[[str], None]
) -> None:
    """Write a checkpoint, its recipe and, for texts, the tokenizer.

    version: None for the newest; format: a key of SUFFIXES; out: the file to write; say: receives each line of the report.
    Raises ModelError for a model that does not exist, or that the format cannot express. Then nothing is written.
    """
    if out.suffix not in SUFFIXES[format]:
        raise ExportRefused(f"{out} is no name of a file for {format}: let it end in {' or '.join(SUFFIXES[format])}")
    name, folder = store.find_version(settings.models, model, version, settings.alias)
    described = spec.read(folder, name)
    export = _export(Model(described, store.read_arrays(folder, described)), format, out.suffix)
    files, tokenizer = {out: export.content, Path(f"{out}.toml"): store.toml(export.recipe).encode()}, ""
    if described.input.kind == "text":
        files[Path(f"{out}.tokenizer.json")] = spec.read_verified(folder / spec.TOKENIZER, described)
        tokenizer = f" --tokenizer {out}.tokenizer.json"
    if described.precision == "int8":
        say("note: its int8 matrices are written as float32, each number times its scale")
    if export.note:
        say(f"note: {export.note}")
    for file, content in files.items():
        with replacing(file) as written:
            written.write_bytes(content)
        say(f"{file} is complete.")
    say(f"Read it back: seqserve import {out} --name {described.name} --recipe {out}.toml{tokenizer}")


def _export(model: Model, format: str, suffix: str) -> Export:
    if format == "pytorch":
        return pytorch.export(model, suffix)
    try:
        from service.exporters import onnx  # imports a package of the extra `import`
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise ExportRefused("the package onnx is missing: install seqserve[import]") from error
    return onnx.export(model)
