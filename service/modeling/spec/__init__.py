"""The description of a model, read from its `model.toml`, and the layout of model folders.

Reads no weights and loads no tensor library, so that frontends may import it.

A version folder is models/<name>/<version>/ with `model.toml`, `weights.safetensors`, `card.md` and, for text, `tokenizer.json`. Names
have letters, digits, dots, dashes and underscores; versions are whole numbers from 1. models/aliases.toml may define other names for a
model or for a version of a model.

The models folder may also be the folder of one model, models/<version>/, or of one version, which is then version 1: platforms that
download a model put its files directly into the models folder. The name of such a model is that in its model.toml.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StrictBool, ValidationError, model_validator

from service.errors import ModelError
from service.modeling.spec.error_messages import error_messages, shortened
from service.modeling.spec.files import read_file, read_toml
from service.modeling.spec.heads import Head
from service.modeling.spec.heads.fields import AnswerField
from service.modeling.spec.layers import MATRICES, ConvLayer, Layer, RecurrentLayer, TextCNNLayer, WindowLayer
from service.modeling.spec.table import Count, Shapes, Size, Table

MODEL, WEIGHTS, TOKENIZER, CARD = "model.toml", "weights.safetensors", "tokenizer.json", "card.md"
ALIASES = "aliases.toml"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
VERSION = re.compile(r"[1-9][0-9]{0,8}")
CHARACTERS_PER_STEP = 32
"""No tokeniser is expected to produce fewer tokens than one per 32 characters."""
MAX_TOKENIZER_BYTES, MAX_HEADER_BYTES = 64 << 20, 1 << 20
SHORT_STEPS, MAX_NUMBERS, MAX_FILTERS = 16, 1 << 24, 1 << 28
"""Steps of a short sequence, most numbers in a layer's windows or padding, and in whole filters of groups: files do not bound these."""
MAX_SHOWN = 500
Shown = Annotated[str, Field(min_length=1, max_length=MAX_SHOWN)]


class SequenceInput(Table):
    """The input of a model: text, token ids below `vocabulary`, or steps of `features` floats.

    names: of the features. example: a text that suits the model, for the page and the ready line.
    """

    kind: Literal["text", "ids", "features"]
    max_steps: Count
    vocabulary: Count | None = None
    features: Size | None = None
    names: tuple[Shown, ...] | None = None
    example: Shown | None = None

    @model_validator(mode="after")
    def _sizes_fit_the_kind(self) -> SequenceInput:
        required, forbidden = ("features", "vocabulary") if self.kind == "features" else ("vocabulary", "features")
        if getattr(self, required) is None:
            raise ValueError(f"an input of kind {self.kind!r} requires {required}")
        if getattr(self, forbidden) is not None:
            raise ValueError(f"an input of kind {self.kind!r} has no {forbidden}: remove it")
        if self.names is not None and len(set(self.names)) != self.features:
            raise ValueError(
                f"names has {len(set(self.names))} different names and features is {self.features or 0}: name each feature"
            )
        if self.example is not None and self.kind != "text":
            raise ValueError(f"an input of kind {self.kind!r} has no example: remove it")
        return self

    @cached_property
    def max_characters(self) -> int:
        """Length of the longest text that is tokenised; a longer one would exceed `max_steps` in any case."""
        return CHARACTERS_PER_STEP * self.max_steps

    @property
    def step_bytes(self) -> int:
        """Size of one time step as the engine takes it: an int32 token id, or `features` float32 numbers."""
        return 4 * (self.features or 1)


class ModelSpec(Table):
    """The content of model.toml. `sha256` has the digest of every other file that is read to serve the model.

    What walks the layers is computed once, as requests ask for it. A copy keeps it: no copy has other layers or another input.
    """

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    description: str = ""
    precision: Literal["float32", "float16", "bfloat16", "int8"]
    fold: Literal["auto", "never"] = "auto"
    pin_backend: StrictBool = False
    input: SequenceInput
    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=256)]
    head: Head
    sha256: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(default_factory=dict, max_length=16)

    @model_validator(mode="after")
    def _layers_follow_each_other(self) -> ModelSpec:
        kinds = [layer.kind for layer in self.layers]
        if "embedding" in kinds[1:]:
            raise ValueError("an embedding can only be the first layer")
        if (kinds[0] == "embedding") != (self.input.kind != "features"):
            raise ValueError(
                f"an input of kind {self.input.kind!r} does not fit a first layer of kind {kinds[0]!r}: "
                "text and ids need an embedding, features have none"
            )
        if "text_cnn" in kinds[:-1]:
            raise ValueError("a text_cnn outputs one vector per sequence: it can only be the last layer")
        return self

    @model_validator(mode="after")
    def _groups_divide_the_inputs(self) -> ModelSpec:
        self.tensors()  # raises ValueError if the sizes of a layer do not fit its input
        return self

    @model_validator(mode="after")
    def _max_steps_is_at_least_min_steps(self) -> ModelSpec:
        if self.min_steps > self.input.max_steps:
            raise ValueError(f"the layers need {self.min_steps} steps and input.max_steps is {self.input.max_steps}: raise it")
        return self

    @model_validator(mode="after")
    def _a_short_sequence_needs_little(self) -> ModelSpec:
        inputs, steps, filters = self.input.vocabulary or self.input.features or 0, max(self.min_steps, SHORT_STEPS), 0
        for index, layer in enumerate(self.layers):
            outputs, width, padded = layer.output_width(inputs), 0, 0
            if isinstance(layer, WindowLayer):
                width, padded = layer.width, steps + sum(layer.padding_steps)
                steps = max(1, (padded - layer.reach) // layer.stride + 1)
            elif isinstance(layer, TextCNNLayer):
                width, steps = max(layer.widths), steps + 2 * layer.padding
            if (numbers := max(padded * inputs, steps * width * inputs, steps * outputs)) > MAX_NUMBERS:
                raise ValueError(f"layers.{index} needs {numbers} numbers for a short sequence, more than {MAX_NUMBERS}")
            filters += width * inputs * outputs if isinstance(layer, ConvLayer) and layer.groups > 1 else 0
            inputs = outputs
        if filters > MAX_FILTERS:
            raise ValueError(f"the groups become whole filters of {filters} numbers, more than {MAX_FILTERS}")
        return self

    @model_validator(mode="after")
    def _head_fits_the_encoder(self) -> ModelSpec:
        if not self.has_steps and self.pools != ("max",):
            raise ValueError('a text_cnn needs a head of kind classify, regress or embed with pool = "max"')
        self.head.check_vocabulary(self.input.vocabulary)
        return self

    def tensors(self) -> Shapes:
        """Return the name and shape of every tensor of the layers and the head."""
        shapes: Shapes = {}
        inputs = self.input.vocabulary or self.input.features or 0
        for index, layer in enumerate(self.layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.tensors(inputs).items()}
            inputs = layer.output_width(inputs)
        head = self.head.tensors(inputs, self.input.vocabulary)
        return shapes | {f"head.{name}": shape for name, shape in head.items()}

    def max_bytes(self, file: str) -> int:
        """Return the most bytes that a file of the version folder may have."""
        if file != WEIGHTS:
            return MAX_TOKENIZER_BYTES
        return MAX_HEADER_BYTES + sum(1024 + 4 * math.prod(shape) for shape in self.tensors().values())

    def matrices(self) -> list[str]:
        """Return the names of the tensors that are stored as int8 numbers if that is the precision."""
        return [name for name in self.tensors() if name.rpartition(".")[2] in MATRICES]

    @property
    def min_steps(self) -> int:
        """The shortest sequence, in steps, for which every layer has an output."""
        steps = 1
        for layer in reversed(self.layers):
            steps = layer.steps_for(steps)
        return steps

    @property
    def takes_empty(self) -> bool:
        """Whether a sequence without steps has an answer: no layer needs several steps, and the head needs none."""
        return self.min_steps == 1 and self.head.takes_empty

    @cached_property
    def states(self) -> dict[str, int]:
        """The states of the recurrent layers by name, such as `layers.1.0.forward.hidden`, and their widths.

        Requests may bring them and request them. Empty for a model without recurrent layers, or with a QRNN with a window of
        several steps.
        """
        widths: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, RecurrentLayer):
                continue
            if layer.states is None:
                return {}
            for level, direction, (array, width) in product(range(layer.depth), layer.directions, layer.states.items()):
                widths[f"layers.{index}.{level}.{direction}.{array}"] = width
        return widths

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools of the head, or none if it works on every step."""
        return self.head.pools

    @cached_property
    def answer_fields(self) -> tuple[AnswerField, ...]:
        """The fields of the head's answer."""
        return self.head.fields(self.output_width)

    @cached_property
    def answers_steps(self) -> bool:
        """Whether the head's answer has a line for each step."""
        return self.head.answers_steps

    @cached_property
    def output_width(self) -> int:
        """Width of the vectors of the last layer."""
        inputs = self.input.vocabulary or self.input.features or 0
        for layer in self.layers:
            inputs = layer.output_width(inputs)
        return inputs

    @property
    def embedding_width(self) -> int:
        """Width of the vector that the head works on."""
        return self.head.vector_width(self.output_width)

    @property
    def has_steps(self) -> bool:
        """Whether the last layer outputs a vector per step, so that a request may return the sequence."""
        return self.layers[-1].kind != "text_cnn"

    @property
    def has_embedding(self) -> bool:
        """Whether the head works on one vector per sequence, so that a request may return the embedding."""
        return bool(self.head.pools)

    @cached_property
    def vectors(self) -> frozenset[str]:
        """What a request may return besides the output of the head: of embedding, sequence and state."""
        has = {"embedding": self.has_embedding, "sequence": self.has_steps, "state": bool(self.states)}
        return frozenset(name for name, present in has.items() if present)


def read(folder: Path, name: str | None = None) -> ModelSpec:
    """Read the model.toml of a version folder; raises ModelError if it is missing or invalid.

    name: that the model must have, by default the name of the folder around the version folder.
    """
    file = folder / MODEL
    values = read_toml(file)
    if values is None:
        raise ModelError(f"{file} is missing: a version folder needs {MODEL}, {WEIGHTS} and, for text, {TOKENIZER}")
    try:
        spec = ModelSpec.model_validate(values)
    except ValidationError as error:
        raise ModelError("; ".join(f"{file}: {message}" for message in error_messages(error))) from error
    if spec.name != (name or folder.parent.name):
        raise ModelError(
            f"{file}: name is {spec.name!r} and the folder is {name or folder.parent.name!r}: use the same name for both"
        )
    return spec


def read_verified(file: Path, spec: ModelSpec) -> bytes:
    """Return the content of a file of a version folder; raises ModelError unless its digest matches `spec`."""
    try:
        data = read_file(file, limit=spec.max_bytes(file.name))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    expected = spec.sha256.get(file.name)
    if expected is None:
        raise ModelError(f"{file.parent / MODEL}: sha256 has no entry for {file.name}: add the digest that sha256sum prints")
    if digest(data) != expected:
        raise ModelError(
            f"{file} does not have the digest in {MODEL}: copy the file again, or update sha256 if you changed it on purpose"
        )
    return data


def digest(data: bytes) -> str:
    """Return the SHA-256 digest in the form that `sha256sum` prints."""
    return hashlib.sha256(data).hexdigest()


def find_models(root: Path) -> dict[str, dict[str, Path]]:
    """Return each model's version folders in ascending order; raises ModelError for invalid names and for an empty models folder."""
    return {name: version_folders(folder, name) for name, folder in model_folders(root).items()}


def model_folders(root: Path) -> dict[str, Path]:
    """Return the folder of each model, whatever it contains; raises ModelError for an empty models folder."""
    if not root.is_dir():
        raise ModelError(f"models folder {root} does not exist: create it, or name another folder with --models")
    folders = named_folders(root)
    if not folders:
        raise ModelError(f"models folder {root} has no model: put one there, or name another folder with --models")
    return folders


def named_folders(root: Path) -> dict[str, Path]:
    """Return the folder of each model, or none; raises ModelError if `root` is the folder of one model, and its model.toml is invalid."""
    versions = _direct_versions(root)
    if versions:
        return {_name_in(versions[-1]): root}
    # A name that is not UTF-8 is shown with escapes: no message between processes can have it.
    return {os.fsencode(folder.name).decode(errors="backslashreplace"): folder for folder in visible_folders(root)}


def versions_by_folder(root: Path) -> dict[str, list[str]]:
    """Return the versions in every folder, which may have a name that no model can have, or may not be readable."""
    versions: dict[str, list[str]] = {}
    for name, folder in named_folders(root).items():
        versions[name] = []
        with suppress(OSError, ModelError):
            versions[name] = list(version_folders(folder, name))
    return versions


def require_models_folder(root: Path) -> None:
    """Create the folder of all models if it is missing; raises ModelError if no model can be added, such as to the folder of one model."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{root} cannot be written: {error}") from error
    if _direct_versions(root):
        raise ModelError(
            f"{root} is the folder of one model, to which none can be added: name the folder of all models with --models"
        )


def _direct_versions(root: Path) -> list[Path]:
    """Return the version folders of `root` in ascending order if it is the folder of one model, or `root` if it is that of a version."""
    if (root / MODEL).exists():
        return [root]
    return [folder for folder in _numbered_folders(root) if (folder / MODEL).exists()]


def _name_in(folder: Path) -> str:
    """Return the name in the model.toml of a version folder; raises ModelError."""
    file = folder / MODEL
    name = (read_toml(file) or {}).get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ModelError(f"{file}: name is {shortened(name)}: use letters, digits, '.', '_' and '-'")
    return name


def version_folders(folder: Path, name: str | None = None) -> dict[str, Path]:
    """Return the version folders of a model, in ascending order; raises ModelError for an invalid name or no version.

    name: of the model, by default that of the folder. A folder with a model.toml is itself version 1. Folders such as old/ are no versions.
    """
    if not NAME.fullmatch(name or folder.name):
        shown = folder.parent / (name or folder.name)
        raise ModelError(f"{shown}: a model name has letters, digits, '.', '_' and '-' only: rename the folder")
    if (folder / MODEL).exists():
        return {"1": folder}
    versions = _numbered_folders(folder)
    if not versions:
        raise ModelError(f"{folder} has no version folder, named 1, 2 and so on: put the model's files into {folder / '1'}")
    return {version.name: version for version in versions}


def _numbered_folders(folder: Path) -> list[Path]:
    versions = [path for path in visible_folders(folder) if VERSION.fullmatch(path.name)]
    return sorted(versions, key=lambda path: int(path.name))


def next_version(root: Path, name: str) -> Path:
    """Return the folder of the next version of a model, which may have none."""
    home = root / name
    numbers = [int(version.name) for version in _numbered_folders(home)] if home.is_dir() else []
    return home / str(1 + max(numbers, default=int((home / MODEL).exists())))


def read_aliases(root: Path, models: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return the aliases of aliases.toml, each for a `model` or a `model/version`; raises ModelError for an alias without a target.

    models: the versions of each model.
    """
    file = root / ALIASES
    alias_targets = read_toml(file) or {}
    for alias, target in alias_targets.items():
        if alias in models or not NAME.fullmatch(alias):
            raise ModelError(f"{file}: the alias {alias!r:.80} is the name of a model, or not a valid name: choose another")
        model, pinned, version = target.partition("/") if isinstance(target, str) else ("", "", "")
        shown = shortened(target)
        if model not in models:
            raise ModelError(f"{file}: {alias} stands for {shown}, which does not exist: the models are {', '.join(models)}")
        if pinned and version not in models[model]:
            raise ModelError(f"{file}: {alias} stands for {shown}, and {model} has the versions {', '.join(models[model])}")
    return alias_targets


def visible_folders(root: Path) -> Iterator[Path]:
    """Return the folders within `root` that are not hidden: models in the models folder, versions in a model folder."""
    return (path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith((".", "lost+found")))
