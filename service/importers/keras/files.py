"""Opens the files of Keras: .keras archives, .weights.h5 and .h5. Nothing is unpacked to a disk."""

from __future__ import annotations

import json
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.importers.draft import ZIP_ERRORS, ImportRefused, refusing
from service.importers.hdf5 import SAVE_AGAIN, Hdf5, opened
from service.modeling.spec.files import read_file

JSON_BYTES = 1 << 26
ARCHIVE = ".keras"
WEIGHTS_MEMBER, CONFIG_MEMBER, METADATA_MEMBER = "model.weights.h5", "config.json", "metadata.json"
BESIDE = ("config.json", "model.json")
"""Names of files with the architecture, for a file with weights only. The name of that file with .json comes first."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved model.

    architecture: decoded JSON; is_keras_2: whether Keras 2 or older wrote it; is_whole: whether the architecture is in the file itself;
    notes: facts that its user must know.
    """

    architecture: Any
    weights: Hdf5
    is_keras_2: bool
    is_whole: bool = True
    notes: tuple[str, ...] = ()


@contextmanager
def saved(path: Path) -> Iterator[Saved]:
    """Open the model in a file; raises ImportRefused if it is none."""
    # Keras 2 can be made to write HDF5 into a file named .keras.
    is_archive = path.suffix == ARCHIVE and zipfile.is_zipfile(path)
    with _archive(path) if is_archive else _hdf5(path) as model:
        yield model


@contextmanager
def _archive(path: Path) -> Iterator[Saved]:
    with refusing(ZIP_ERRORS, f"{path} is not a complete .keras archive", SAVE_AGAIN), zipfile.ZipFile(path) as archive:
        config = decoded(_member(archive, path, CONFIG_MEMBER, JSON_BYTES), f"{path}: {CONFIG_MEMBER}")
        metadata = decoded(_member(archive, path, METADATA_MEMBER, JSON_BYTES), f"{path}: {METADATA_MEMBER}")
        content = _member(archive, path, WEIGHTS_MEMBER, path.stat().st_size)
    version = metadata.get("keras_version") if isinstance(metadata, dict) else None
    with opened(content, f"{path}: {WEIGHTS_MEMBER}") as weights:
        yield Saved(config, weights, _is_keras_2(version))


def _member(archive: zipfile.ZipFile, path: Path, name: str, limit: int) -> bytes:
    """Return a file of an archive, which Keras stores as it is."""
    members = [member for member in archive.infolist() if member.filename == name]
    if len(members) != 1:
        found = ", ".join(member.filename for member in archive.infolist()[:5]) or "nothing"
        raise ImportRefused(f"{path} has {len(members)} files {name}, and a .keras archive has one. It has {found}")
    member = members[0]
    if member.compress_type != zipfile.ZIP_STORED or stat.S_ISLNK(member.external_attr >> 16):
        raise ImportRefused(f"{path}: {name} is compressed or a link, and Keras stores it as it is: save the model again")
    if member.file_size > limit:
        raise ImportRefused(f"{path}: {name} has {member.file_size} bytes, and at most {limit} are read")
    with archive.open(member) as file:
        return file.read(limit + 1)


@contextmanager
def _hdf5(path: Path) -> Iterator[Saved]:
    with opened(path, str(path)) as weights:
        given = weights.text("", "model_config")
        if given is None:
            architecture, note = _beside(path)
            version = weights.text("", "keras_version") or architecture.get("keras_version")
            yield Saved(architecture, weights, _is_keras_2(version), is_whole=False, notes=(note,))
        else:
            version = weights.text("", "keras_version")
            yield Saved(decoded(given, f"{path}: model_config"), weights, _is_keras_2(version or "2"))


def _beside(path: Path) -> tuple[dict[str, Any], str]:
    """Return the architecture from another file in the folder of the weights, and a note."""
    named = path.with_name(path.name.removesuffix(".h5").removesuffix(".weights") + ".json")
    for file in (named, *(path.with_name(name) for name in BESIDE)):
        if file.is_file():
            try:
                if file.stat().st_size > JSON_BYTES:
                    raise ImportRefused(f"{file} has {file.stat().st_size} bytes, and at most {JSON_BYTES} are read")
                architecture = decoded(read_file(file), str(file))
            except OSError as error:
                raise ImportRefused(f"{file} cannot be read: {error.strerror}") from error
            if not isinstance(architecture, dict):
                raise ImportRefused(f"{file} is not the architecture of a model: write model.to_json() into it")
            return architecture, f"the architecture is that of {file.name}, because {path.name} has weights only"
    raise ImportRefused(
        f"{path.name} has weights and no architecture: write model.to_json() into {named.name} beside it, or save the whole model "
        "as .keras"
    )


def decoded(content: bytes | str, where: str) -> Any:
    """Return the value of a JSON text; raises ImportRefused if it is none."""
    with refusing((ValueError, RecursionError), f"{where} is not the JSON that Keras writes", SAVE_AGAIN):
        return json.loads(content if isinstance(content, bytes) else content.encode())


def _is_keras_2(version: Any) -> bool:
    """Whether a version of Keras, or of TensorFlow's Keras, is older than 3. Keras 3 leaves it out of model.to_json()."""
    return isinstance(version, str) and version.partition(".")[0] in ("0", "1", "2")
