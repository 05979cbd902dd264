"""What a model is, as its `model.toml` says it. Reads no weights and loads no tensor library, so that fronts may use it.

A model folder is models/<name>/<version>/ with `model.toml`, `weights.safetensors`, `card.md` and, for text,
`tokenizer.json`. Names are letters, digits, dot, dash and underscore; versions are whole numbers from 1. models/aliases.toml may
give a model, or one version of it, other names.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from service.errors import ModelError
from service.modeling.spec.heads import (
    HEAD_KINDS,
    ClassifyHead,
    EmbedHead,
    Head,
    NextHead,
    RegressHead,
    SequenceHead,
    SpanHead,
    TagHead,
)
from service.modeling.spec.layers import (
    LAYER_KINDS,
    ConvLayer,
    EmbeddingLayer,
    GRULayer,
    Layer,
    LSTMLayer,
    QRNNLayer,
    RecurrentLayer,
    SRULayer,
    TCNLayer,
    TextCNNLayer,
)
from service.modeling.spec.table import Shapes, Size, Table

__all__ = [
    "ClassifyHead",
    "ConvLayer",
    "EmbedHead",
    "EmbeddingLayer",
    "GRULayer",
    "Head",
    "LSTMLayer",
    "Layer",
    "ModelSpec",
    "NextHead",
    "QRNNLayer",
    "RecurrentLayer",
    "RegressHead",
    "SRULayer",
    "SequenceHead",
    "SequenceInput",
    "SpanHead",
    "TCNLayer",
    "TagHead",
    "TextCNNLayer",
    "aliases",
    "digest",
    "find",
    "folders",
    "read",
    "verified",
    "versions",
]

MODEL, WEIGHTS, TOKENIZER, CARD = "model.toml", "weights.safetensors", "tokenizer.json", "card.md"
ALIASES = "aliases.toml"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
VERSION = re.compile(r"[1-9][0-9]{0,8}")
CHARACTERS_PER_STEP = 32


class SequenceInput(Table):
    """What one sequence is: a text, token ids below `vocabulary`, or rows of `features` floats."""

    kind: Literal["text", "ids", "features"]
    max_steps: Size
    vocabulary: Size | None = None
    features: Size | None = None

    @model_validator(mode="after")
    def _sizes_fit_the_kind(self) -> SequenceInput:
        wanted, other = ("features", "vocabulary") if self.kind == "features" else ("vocabulary", "features")
        if getattr(self, wanted) is None:
            raise ValueError(f"an input of kind {self.kind!r} needs {wanted}")
        if getattr(self, other) is not None:
            raise ValueError(f"an input of kind {self.kind!r} has no {other}: remove it")
        return self

    @property
    def max_characters(self) -> int:
        """Longest text that is worth tokenising."""
        return CHARACTERS_PER_STEP * self.max_steps


class ModelSpec(Table):
    """A whole model.toml. `sha256` has the digest of every other file that is read to serve the model."""

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    description: str = ""
    precision: Literal["float32", "float16", "bfloat16"]
    input: SequenceInput
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]
    head: Head
    sha256: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _layers_follow_each_other(self) -> ModelSpec:
        kinds = [layer.kind for layer in self.layers]
        if "embedding" in kinds[1:]:
            raise ValueError("an embedding can only be the first layer")
        if (kinds[0] == "embedding") != (self.input.kind != "features"):
            raise ValueError(f"an input of kind {self.input.kind!r} and a first layer of kind {kinds[0]!r} do not fit together")
        if kinds[-1] == "embedding":
            raise ValueError("an encoder needs a layer after its embedding")
        if "text_cnn" in kinds[:-1]:
            raise ValueError("a text_cnn gives one vector a row: it can only be the last layer")
        return self

    @model_validator(mode="after")
    def _a_sequence_is_long_enough(self) -> ModelSpec:
        if self.min_steps > self.input.max_steps:
            raise ValueError(f"the layers need {self.min_steps} steps and input.max_steps is {self.input.max_steps}: raise it")
        return self

    @model_validator(mode="after")
    def _head_fits_the_encoder(self) -> ModelSpec:
        if not self.has_steps and getattr(self.head, "pool", None) != "max":
            raise ValueError('after a text_cnn, the head is classify, regress or embed and its pool is "max"')
        if self.head.kind == "next" and self.input.vocabulary is None:
            raise ValueError('a head of kind "next" needs an input of text or ids')
        if self.head.kind == "next" and self.input.vocabulary is not None and self.head.top > self.input.vocabulary:
            raise ValueError(f"head.top is {self.head.top} and input.vocabulary is {self.input.vocabulary}: lower head.top")
        return self

    def tensors(self) -> Shapes:
        """Name and shape of every tensor in weights.safetensors."""
        shapes: Shapes = {}
        inputs = self.input.vocabulary or self.input.features or 0
        for index, layer in enumerate(self.layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.tensors(inputs).items()}
            inputs = layer.outputs
        head = self.head.tensors(inputs, self.input.vocabulary)
        return shapes | {f"head.{name}": shape for name, shape in head.items()}

    @property
    def min_steps(self) -> int:
        """Fewest steps of a sequence of which every layer has an output."""
        steps = 1
        for layer in reversed(self.layers):
            steps = layer.steps_for(steps)
        return steps

    @property
    def has_steps(self) -> bool:
        """Whether the last layer gives a vector for every step, which `return` may ask for."""
        return self.layers[-1].kind != "text_cnn"

    @property
    def has_embedding(self) -> bool:
        """Whether the head works on one vector a sequence, which `return` may ask for."""
        return self.head.kind in ("classify", "regress", "next", "embed")


def read(folder: Path) -> ModelSpec:
    """The spec of one version; raises ModelError naming the file, the key and the way out."""
    file = folder / MODEL
    try:
        spec = ModelSpec.model_validate(tomllib.loads(file.read_text()))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing: a version folder needs {MODEL}, {WEIGHTS} and, for text, {TOKENIZER}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise ModelError(f"{file}: {fault}") from fault
    except ValidationError as fault:
        raise ModelError("; ".join(f"{file}: {_complaint(dict(error))}" for error in fault.errors())) from fault
    if spec.name != folder.parent.name:
        raise ModelError(f"{file}: name is {spec.name!r} and its folder is {folder.parent.name!r}: make them the same")
    return spec


def verified(file: Path, spec: ModelSpec) -> bytes:
    """The content of one file of a version folder; raises ModelError unless its digest is the one in `spec`."""
    try:
        data = file.read_bytes()
    except OSError as fault:
        raise ModelError(f"{file} cannot be read: {fault.strerror}") from fault
    wanted = spec.sha256.get(file.name)
    if wanted is None:
        raise ModelError(f"{file.parent / MODEL}: sha256 has no entry for {file.name}: add the digest that sha256sum prints")
    if digest(data) != wanted:
        raise ModelError(f"{file} does not have the digest in {MODEL}: the copy is broken, or the digest was not updated")
    return data


def digest(data: bytes) -> str:
    """SHA-256 as `sha256sum` prints it."""
    return hashlib.sha256(data).hexdigest()


def find(root: Path) -> dict[str, dict[str, Path]]:
    """Version folders by model name, versions rising; raises ModelError for names that cannot be served, and when there is none."""
    if not root.is_dir():
        raise ModelError(f"models folder {root} does not exist: name another with --models")
    for folder in folders(root):
        if not NAME.fullmatch(folder.name):
            raise ModelError(f"{folder}: a model name has letters, digits, '.', '_' and '-' only: rename the folder")
    found = {folder.name: versions(folder) for folder in folders(root)}
    if not found:
        raise ModelError(f"models folder {root} has no model: put one there, or name another folder with --models")
    return found


def versions(folder: Path) -> dict[str, Path]:
    """The version folders of a model, rising; raises ModelError for names that cannot be, and when there is none."""
    for version in folders(folder):
        if not VERSION.fullmatch(version.name):
            raise ModelError(f"{version}: a version is a whole number from 1 without leading zeros: rename the folder")
    found = {version.name: version for version in sorted(folders(folder), key=lambda path: int(path.name))}
    if not found:
        raise ModelError(f"{folder} has no version folder: put the model's files into {folder / '1'}")
    return found


def aliases(root: Path, models: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Other names, by alias, from aliases.toml, each for a model or for `model/version`; raises ModelError for one that leads nowhere.

    models: the versions of each.
    """
    file = root / ALIASES
    try:
        found = tomllib.loads(file.read_text()) if file.exists() else {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise ModelError(f"{file}: {fault}") from fault
    for alias, name in found.items():
        if alias in models or not NAME.fullmatch(alias):
            raise ModelError(f"{file}: {alias!r} is a model's own name, or cannot be a name: choose another")
        model, pinned, version = name.partition("/") if isinstance(name, str) else ("", "", "")
        if model not in models:
            raise ModelError(f"{file}: {alias} stands for {name!r}, which is no model here: known are {', '.join(models)}")
        if pinned and version not in models[model]:
            raise ModelError(f"{file}: {alias} stands for {name!r}, and {model} has the versions {', '.join(models[model])}")
    return found


def folders(root: Path) -> Iterator[Path]:
    """What may be the folder of a model, or of a version."""
    return (path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith("."))


def _complaint(error: Mapping[str, Any]) -> str:
    # A discriminated union adds its tag to the location; the reader of a TOML file knows only keys and indices.
    key = ".".join(str(part) for part in error["loc"] if part not in (*LAYER_KINDS, *HEAD_KINDS))
    unknown = error["type"] == "extra_forbidden"
    message = "unknown key: remove it or correct its name" if unknown else str(error["msg"]).removeprefix("Value error, ")
    return f"{key or 'the whole file'}: {message}"
