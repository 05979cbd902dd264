"""What a model is, as its `model.toml` says it. Reads no weights and loads no tensor library, so that fronts may use it.

A model folder is models/<name>/<version>/ with `model.toml`, `weights.safetensors`, `card.md` and, for text,
`tokenizer.json`. Names are letters, digits, dot, dash and underscore; versions are whole numbers from 1.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from service.errors import ModelError

MODEL, WEIGHTS, TOKENIZER, CARD = "model.toml", "weights.safetensors", "tokenizer.json", "card.md"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
VERSION = re.compile(r"[1-9][0-9]{0,8}")
CHARACTERS_PER_STEP = 32
DIRECTIONS = ("forward", "backward")

Size = Annotated[int, Field(gt=0, strict=True)]


class Table(BaseModel):
    """A table of model.toml: no key is unknown, none changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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


class EmbeddingLayer(Table):
    """Token ids to vectors of `width`."""

    kind: Literal["embedding"]
    width: Size

    def tensors(self, inputs: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (inputs, self.width)}

    @property
    def outputs(self) -> int:
        return self.width


class LSTMLayer(Table):
    """`depth` LSTM layers of `hidden` units; a bidirectional one gives [forward | backward]."""

    kind: Literal["lstm"]
    hidden: Size
    depth: Size = 1
    bidirectional: StrictBool = False

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS if self.bidirectional else DIRECTIONS[:1]

    @property
    def outputs(self) -> int:
        return self.hidden * len(self.directions)

    def tensors(self, inputs: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for level in range(self.depth):
            for direction in self.directions:
                shapes[f"{level}.{direction}.input"] = (inputs, 4 * self.hidden)
                shapes[f"{level}.{direction}.recurrent"] = (self.hidden, 4 * self.hidden)
                shapes[f"{level}.{direction}.bias"] = (4 * self.hidden,)
            inputs = self.outputs
        return shapes


Layer = Annotated[EmbeddingLayer | LSTMLayer, Field(discriminator="kind")]


class ClassifyHead(Table):
    """One label for a whole sequence: pool over time, then a linear layer and softmax."""

    kind: Literal["classify"]
    pool: Literal["last", "mean", "max"]
    labels: Annotated[tuple[str, ...], Field(min_length=2)]

    @model_validator(mode="after")
    def _labels_differ(self) -> ClassifyHead:
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("labels must differ from each other")
        return self

    def tensors(self, inputs: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (inputs, len(self.labels)), "bias": (len(self.labels),)}


class ModelSpec(Table):
    """A whole model.toml. `sha256` has the digest of every other file that is read to serve the model."""

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    description: str = ""
    precision: Literal["float32", "float16", "bfloat16"]
    input: SequenceInput
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]
    head: ClassifyHead
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
        return self

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor in weights.safetensors."""
        shapes: dict[str, tuple[int, ...]] = {}
        inputs = self.input.vocabulary or self.input.features or 0
        for index, layer in enumerate(self.layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.tensors(inputs).items()}
            inputs = layer.outputs
        return shapes | {f"head.{name}": shape for name, shape in self.head.tensors(inputs).items()}

    @property
    def width(self) -> int:
        """Width of the encoder's output."""
        return self.layers[-1].outputs


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
    """Version folders by model name, versions rising; raises ModelError for names that cannot be served."""
    if not root.is_dir():
        raise ModelError(f"models folder {root} does not exist: name another with --models")
    found = {folder.name: _versions(folder) for folder in _folders(root)}
    for name in found:
        if not NAME.fullmatch(name):
            raise ModelError(f"{root / name}: a model name has letters, digits, '.', '_' and '-' only: rename the folder")
        if not found[name]:
            raise ModelError(f"{root / name} has no version folder: put the model's files into {root / name / '1'}")
    return found


def _versions(folder: Path) -> dict[str, Path]:
    for version in _folders(folder):
        if not VERSION.fullmatch(version.name):
            raise ModelError(f"{version}: a version is a whole number from 1 without leading zeros: rename the folder")
    return {version.name: version for version in sorted(_folders(folder), key=lambda path: int(path.name))}


def _folders(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith("."))


def _complaint(error: Mapping[str, Any]) -> str:
    # A discriminated union adds its tag to the location; the reader of a TOML file knows only keys and indices.
    key = ".".join(str(part) for part in error["loc"] if part not in ("embedding", "lstm"))
    unknown = error["type"] == "extra_forbidden"
    message = "unknown key: remove it or correct its name" if unknown else str(error["msg"]).removeprefix("Value error, ")
    return f"{key or 'the whole file'}: {message}"
