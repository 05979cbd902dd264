"""Makes a model smaller without training, as a new version, and measures what that changes: `seqserve compress`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.device_name import device_name
from kernels.folder import set_cache_folder
from service.compress.card import compression_section, with_section
from service.compress.comparison import Comparison, compare, median_seconds
from service.compress.inputs import Inputs, random_inputs, read_labelled_texts, read_texts
from service.compress.low_rank import reduce_embedding
from service.compress.vocabulary import prune_vocabulary
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


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes to make, at least one.

    precision: of the new weights; rank: columns of the new embedding, see `reduce_embedding`; vocabulary: words that stay, see
    `prune_vocabulary`; texts: the file in which words are counted.
    """

    precision: str | None = None
    rank: int | None = None
    vocabulary: int | None = None
    texts: Path | None = None


class _Version(NamedTuple):
    """A version to write. definition: its tokenizer.json, if it has one; changes: a phrase for each change."""

    model: spec.ModelSpec
    arrays: Mapping[str, Tensor]
    definition: str | None
    changes: tuple[str, ...]


def compress(
    settings: Settings,
    model: str,
    changes: Changes,
    *,
    version: int | None = None,
    name: str | None = None,
    data: Path | None = None,
) -> tuple[Path, str]:
    """Write a smaller version of a model; return its folder and the section "Compression" of its card.

    version: the version to read, or None for the newest; name: of a new model, or None for the next version of the same model;
    data: a file of labelled texts, or None to compare the versions on random inputs. Raises ModelError.
    """
    torch.set_num_threads(usable_cores())
    set_cache_folder(settings.cache)
    root = settings.models
    target = _target(root, model, version, name)
    before = spec.read(target.source, model)
    tokenizer = Tokenizer.read(target.source, before) if before.input.kind == "text" else None
    compressed = _changed(before, target, tokenizer, changes)
    inputs = _inputs(before, tokenizer, changes.texts, data)
    new_inputs = (
        inputs if compressed.definition is None else _inputs(compressed.model, _new_tokenizer(compressed), changes.texts, data)
    )
    try:
        # A hidden folder is not a model, and one rename within the models folder makes the finished version visible.
        with tempfile.TemporaryDirectory(prefix=".compress-", dir=root) as hidden:
            written = target.folder(Path(hidden))
            after = store.write(written, compressed.model, compressed.arrays, card="", tokenizer=compressed.definition)
            comparison = _compare((target.source, before, inputs), (written, after, new_inputs), settings)
            sizes = _weights_bytes(target.source), _weights_bytes(written)
            source = f"version {target.source.name} of {model}"
            section = compression_section(comparison, source, sizes, compressed.changes)
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


def _changed(before: spec.ModelSpec, target: Target, tokenizer: Tokenizer | None, changes: Changes) -> _Version:
    """Return the version with all changes; raises ModelError if there are none, or if one does not fit the model."""
    if changes.precision == before.precision:
        raise ModelError(f"{target.source} has the precision {changes.precision} already: choose another")
    if (changes.vocabulary is None) != (changes.texts is None):
        raise ModelError("--vocabulary and --texts belong together: words are counted in the texts")
    described = before.model_copy(
        update={"name": target.name, "precision": changes.precision or before.precision, "sha256": {}}
    )
    version = _Version(
        described, store.read_arrays(target.source, before), None if tokenizer is None else tokenizer.definition.decode(), ()
    )
    if changes.vocabulary is not None and changes.texts is not None:
        model, arrays, definition = prune_vocabulary(
            version.model, version.arrays, tokenizer, changes.vocabulary, changes.texts
        )
        phrase = f"{model.input.vocabulary:,} of {before.input.vocabulary:,} tokens"
        version = _Version(model, arrays, definition, (phrase,))
    if changes.rank is not None:
        model, arrays, kept = reduce_embedding(version.model, version.arrays, changes.rank)
        phrase = f"an embedding of rank {changes.rank} ({100 * kept:.2f} % of the squares of its product with the next layer)"
        version = _Version(model, arrays, version.definition, (*version.changes, phrase))
    if changes.precision is not None:
        version = version._replace(changes=(*version.changes, f"precision {changes.precision}"))
    if not version.changes:
        raise ModelError("nothing would change: give --precision, --rank or --vocabulary")
    return version


def _new_tokenizer(version: _Version) -> Tokenizer:
    assert version.definition is not None
    return Tokenizer(version.definition.encode())


def _inputs(model: spec.ModelSpec, tokenizer: Tokenizer | None, texts: Path | None, data: Path | None) -> Inputs:
    """Return the inputs of the comparison as a version of the model takes them: its token ids may have changed."""
    if data is not None:
        return read_labelled_texts(data, model, tokenizer)
    return random_inputs(model) if texts is None or tokenizer is None else read_texts(texts, model, tokenizer)


def _compare(
    before: tuple[Path, spec.ModelSpec, Inputs], after: tuple[Path, spec.ModelSpec, Inputs], settings: Settings
) -> Comparison:
    """Compare two versions on a CPU, and their times on a CPU and on the GPU, if there is one."""
    devices = [torch.device("cpu"), *([torch.device("cuda:0")] if torch.cuda.is_available() else [])]
    times: dict[str, tuple[float, float]] = {}
    for device in devices:
        encoders = [_encoder(folder, described, settings, device) for folder, described, _ in (before, after)]
        inputs = before[2], after[2]
        times[device_name(device)] = median_seconds(encoders, inputs)
        if device.type == "cpu":
            on_cpu = encoders
    return compare(on_cpu, inputs, times)


def _encoder(folder: Path, described: spec.ModelSpec, settings: Settings, device: torch.device) -> Encoder:
    """Return a version as the engine of a device runs it."""
    return Encoder(described, store.read_arrays(folder, described), device, settings.fold_limit_bytes)


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
