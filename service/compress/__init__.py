"""Stores a model in a lower precision, as a new version, and measures what that changes: `seqserve compress`."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.device_name import device_name
from kernels.folder import set_cache_folder
from service.compress.card import compression_section, with_section
from service.compress.comparison import Comparison, compare, median_seconds
from service.compress.inputs import Inputs, random_inputs, read_labelled_texts
from service.cores import usable_cores
from service.errors import ModelError
from service.modeling import spec, store
from service.modeling.encoder import Encoder
from service.modeling.tokenizer import Tokenizer
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Target:
    """Where the new version will be, and the existing version that it is made of."""

    source: Path
    name: str
    version: int

    def folder(self, root: Path) -> Path:
        return root / self.name / str(self.version)


def compress(
    settings: Settings,
    model: str,
    precision: str,
    *,
    version: int | None = None,
    name: str | None = None,
    data: Path | None = None,
) -> tuple[Path, str]:
    """Write a version of a model with another precision; return its folder and the section "Compression" of its card.

    version: the version to read, or None for the newest; name: of a new model, or None for the next version of the same model;
    data: a file of labelled texts, or None to compare the versions on random inputs. Raises ModelError.
    """
    torch.set_num_threads(usable_cores())
    set_cache_folder(settings.cache)
    root = settings.models
    target = _target(root, model, version, name)
    before = spec.read(target.source, model)
    if precision == before.precision:
        raise ModelError(f"{target.source} has the precision {precision} already: choose another")
    tokenizer = Tokenizer.read(target.source, before) if before.input.kind == "text" else None
    inputs = random_inputs(before) if data is None else read_labelled_texts(data, before, tokenizer)
    try:
        # A hidden folder is not a model, and one rename within the models folder makes the finished version visible.
        with tempfile.TemporaryDirectory(prefix=".compress-", dir=root) as hidden:
            written = target.folder(Path(hidden))
            after = _write(written, before, target, precision, tokenizer)
            comparison = _compare((target.source, before), (written, after), inputs, settings)
            sizes = _weights_bytes(target.source), _weights_bytes(written)
            section = compression_section(comparison, f"version {target.source.name} of {model}", sizes)
            (written / spec.CARD).write_text(with_section(_card(target.source), section))
            _publish(written, target.folder(root))
    except OSError as error:
        raise ModelError(f"{target.folder(root)} cannot be written: {error}") from error
    return target.folder(root), section


def _target(root: Path, model: str, version: int | None, name: str | None) -> Target:
    """Return the version to read and the version to write; raises ModelError for a version that does not exist, or a new name that does."""
    spec.require_models_folder(root)
    source, models = store.find_version(root, model, version), spec.find_models(root)
    if name is None:
        return Target(source, model, int(list(models[model])[-1]) + 1)
    if not spec.NAME.fullmatch(name):
        raise ModelError(f"{name!r} is not a name of a model: use letters, digits, '.', '_' and '-'")
    if name in models or name in spec.read_aliases(root, models):
        raise ModelError(f"{name} exists in {root}: choose another name, or leave --name out for the next version of {model}")
    return Target(source, name, 1)


def _write(folder: Path, before: spec.ModelSpec, target: Target, precision: str, tokenizer: Tokenizer | None) -> spec.ModelSpec:
    """Write the weights of a version in another precision, and return the description of the new version."""
    described = before.model_copy(update={"name": target.name, "precision": precision, "sha256": {}})
    arrays = store.read_arrays(target.source, before)
    definition = None if tokenizer is None else tokenizer.definition.decode()
    return store.write(folder, described, arrays, card="", tokenizer=definition)


def _compare(
    before: tuple[Path, spec.ModelSpec], after: tuple[Path, spec.ModelSpec], inputs: Inputs, settings: Settings
) -> Comparison:
    """Compare two versions on a CPU, and their times on a CPU and on the GPU, if there is one."""
    devices = [torch.device("cpu"), *([torch.device("cuda:0")] if torch.cuda.is_available() else [])]
    times: dict[str, tuple[float, float]] = {}
    for device in devices:
        encoders = [_encoder(folder, described, settings, device) for folder, described in (before, after)]
        times[device_name(device)] = median_seconds(encoders, inputs.sequences)
        if device.type == "cpu":
            on_cpu = encoders
    return compare(on_cpu, inputs, times)


def _encoder(folder: Path, described: spec.ModelSpec, settings: Settings, device: torch.device) -> Encoder:
    """Return a version as the engine of a device runs it."""
    return Encoder(described, store.read_arrays(folder, described), device)


def _weights_bytes(folder: Path) -> int:
    return (folder / spec.WEIGHTS).stat().st_size


def _card(folder: Path) -> str:
    """Return the card of a version, or an empty text if it has none."""
    file = folder / spec.CARD
    return file.read_text() if file.exists() else ""


def _publish(written: Path, folder: Path) -> None:
    """Move a complete version folder, or the folder of a new model, into the models folder. Raises OSError if it exists by now."""
    if folder.parent.exists():
        written.rename(folder)
    else:
        written.parent.rename(folder.parent)
