"""The models of a frontend: each version with its spec and tokenizer, found by name, by alias or by the engines' key."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import orjson

from service.errors import InvalidModel, ModelError, ServiceError, Unavailable, UnknownModel
from service.frontend.run.head_outputs import OutputWriter
from service.frontend.run.quoting import quote
from service.ipc.messages.control import NotLoaded
from service.ipc.messages.models import IndexEntry, Manifest, ModelKey, ModelVersion
from service.log import Log
from service.modeling.spec import CARD, WEIGHTS, ModelSpec
from service.modeling.spec.files import read_file
from service.modeling.spec.heads.fields import AnswerField, Extent
from service.modeling.tokenizer import Tokenizer

MAX_LISTED = 8
"""Names of models in an error."""
MAX_COMPARED = 64
"""Names that are compared with an unknown name, and characters of that name."""
MAX_CARD_BYTES = 1 << 16
"""Of a model card; a longer card is cut off."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One version of a model. `generation` identifies the content of its folder, as in the engines' ModelKey.

    `writer` writes its outputs. `min_steps` is the shortest sequence that it takes, 0 if it answers sequences without steps too.
    `step_bytes` is the size of a time step. `identity` has its name and version as JSON members. `step_numbers` are those of
    the head's answer for a step, without its vector: a label counts as the numbers that are as long. `card` is the content of its card.md.
    `weight_bytes` is the size of its file of weights.
    """

    spec: ModelSpec
    version: str
    tokenizer: Tokenizer | None
    generation: int = 0
    card: bytes = field(default=b"", compare=False, repr=False)
    weight_bytes: int = field(default=0, compare=False, repr=False)
    key: ModelKey = field(init=False)
    writer: OutputWriter = field(init=False, compare=False, repr=False)
    min_steps: int = field(init=False, compare=False, repr=False)
    step_bytes: int = field(init=False, compare=False, repr=False)
    identity: bytes = field(init=False, compare=False, repr=False)
    step_numbers: int = field(init=False, compare=False, repr=False)

    def answer_numbers(self, steps: int, *, sequence: bool) -> int:
        """Return how many numbers the answer for these steps has at most, as far as they grow with the steps.

        sequence: whether the request asks for the vector of every step.
        """
        numbers = self.step_numbers
        if sequence or self.spec.head.answer_vector == "sequence":
            numbers += self.spec.output_width
        return steps * numbers

    def __post_init__(self) -> None:
        identity = b'"model":%b,"version":%b' % (orjson.dumps(self.spec.name), orjson.dumps(self.version))
        object.__setattr__(self, "key", ModelKey(self.spec.name, self.version, self.generation))
        object.__setattr__(self, "writer", OutputWriter(self.spec))
        object.__setattr__(self, "min_steps", 0 if self.spec.takes_empty else self.spec.min_steps)
        object.__setattr__(self, "step_bytes", self.spec.input.step_bytes)
        object.__setattr__(self, "identity", identity)
        of_steps = [field for field in self.spec.answer_fields if field.extent is Extent.STEP and field.source != "sequence"]
        object.__setattr__(self, "step_numbers", sum(map(_numbers_of_step, of_steps)))


def _numbers_of_step(field: AnswerField) -> int:
    """Return the numbers of a field for a step. A number in JSON has about 10 bytes, and a label counts as its length in numbers."""
    longest = max((len(orjson.dumps(label)) for label in field.labels), default=0)
    return max(field.width or 1, longest // 10)


ModelIndex = dict[str, dict[str, ServedModel]]
"""Served models by name or alias, then by version in ascending order."""


def read_served_model(model_version: ModelVersion) -> ServedModel:
    """Return a model version with its tokenizer; raises ModelError when the tokenizer file does not match the spec."""
    spec, folder = ModelSpec.model_validate_json(model_version.spec), Path(model_version.folder)
    tokenizer = Tokenizer.read(folder, spec) if spec.input.kind == "text" else None
    card, weight_bytes = _read_card(folder / CARD), _size(folder / WEIGHTS)
    return ServedModel(spec, model_version.version, tokenizer, model_version.generation, card, weight_bytes)


def _read_card(file: Path) -> bytes:
    """Return the beginning of a model card, empty if it cannot be read: a model is served without its card."""
    try:
        return read_file(file, MAX_CARD_BYTES)
    except OSError:
        return b""


def _size(file: Path) -> int:
    """Return the bytes of a file, 0 if it is gone: the engines have read it."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def build_catalog(
    manifest: Manifest, log: Log, *, strict: bool, report: Callable[[NotLoaded], None] = lambda _: None
) -> Catalog:
    """Read every model version with its tokenizer.

    A version that cannot be read raises ModelError, or is logged, reported and left out unless `strict`.
    """
    models = []
    for version in manifest.model_versions:
        try:
            models.append(read_served_model(version))
        except ModelError as error:
            if strict:
                raise
            log.error("not loaded", model=version.name, version=version.version, error=str(error))
            report(NotLoaded(version.key, InvalidModel.code, str(error)))
    return Catalog(models, manifest.aliases, manifest.unavailable)


class Catalog:
    """The known model versions, and an index of the served versions.

    A version that is not served yet, or no longer, stays known: sessions that began with it continue with it.
    """

    def __init__(
        self, models: Iterable[ServedModel], aliases: Mapping[str, str], unavailable: Sequence[IndexEntry] = ()
    ) -> None:
        """unavailable: the versions that should be served and cannot be, each with the reason."""
        self._known = {model.key: model for model in models}
        self._aliases = aliases
        self.unavailable = unavailable
        self.index = _build_index(self._known.values(), aliases)

    def __getitem__(self, key: ModelKey) -> ServedModel:
        return self._known[key]

    def __contains__(self, key: ModelKey) -> bool:
        return key in self._known

    @property
    def served(self) -> list[ServedModel]:
        """Every served version once, although the index lists it under each alias too."""
        return list({model.key: model for versions in self.index.values() for model in versions.values()}.values())

    def find(self, name: str, version: str | int | None) -> ServedModel:
        """Return a served model by name or alias, its newest version for None.

        Raises UnknownModel with the names that are served, or Unavailable for a version that should be served and cannot be.
        """
        versions = self.index.get(name)
        if versions is None:
            self._check_available(name, version)
            raise UnknownModel(f"unknown model {quote(name)}: {self._way_out(name)}", field="model")
        if version is None:
            return versions[next(reversed(versions))]
        number = str(version)
        if number not in versions:
            self._check_available(name, version)
            raise UnknownModel(
                f"{name} has no version {quote(number)}: served are {', '.join(versions)}; leave version out for the newest",
                field="version",
            )
        return versions[number]

    def _check_available(self, name: str, version: str | int | None) -> None:
        """Raise Unavailable, with the reason, for a version that should be served and cannot be."""
        model, number = self._target(name, version)
        for entry in self.unavailable:
            if entry.name == model and ("" in (number, entry.version) or entry.version == number):
                which = f"{model} version {entry.version}" if entry.version else model
                raise Unavailable(
                    f"{which} cannot be served: {entry.reason}; repair its folder and load the model again", field="model"
                )

    def _target(self, name: str, version: str | int | None) -> tuple[str, str]:
        """Return the model and the version that a request names. The version is empty for the newest."""
        model, _, pinned = self._aliases.get(name, name).partition("/")
        return model, pinned or ("" if version is None else str(version))

    def _way_out(self, name: str) -> str:
        """Return the advice for an unknown name: the names that are served, or of many names the similar names."""
        if len(self.index) <= MAX_LISTED:
            return f"served are {', '.join(sorted(self.index))}"
        # Any client may cause this search: it takes less than a millisecond.
        candidates = islice((served for served in self.index if served[:1] == name[:1]), MAX_COMPARED)
        near = difflib.get_close_matches(name[:MAX_COMPARED], candidates, MAX_LISTED)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        return f"{hint}GET /models lists the {len(self.index)} names that are served"

    def find_retired(self, name: str, version: str | int | None) -> ServedModel | None:
        """Return the latest known version that matches, served or not: an open session may have begun with it."""
        model, number = self._target(name, version)
        keys = [key for key in self._known if key.name == model and number in ("", key.version)]
        return self._known[max(keys, key=lambda key: key.generation)] if keys else None

    def find_or_retired(self, name: str, version: str | int | None) -> tuple[ServedModel, ServiceError | None]:
        """Return a served model and None, or a retired one and the error for requests that do not continue a session.

        Raises that error when neither exists.
        """
        try:
            return self.find(name, version), None
        except (UnknownModel, Unavailable) as error:
            retired = self.find_retired(name, version)
            if retired is None:
                raise
            return retired, error

    def has_other_versions(self, key: ModelKey) -> bool:
        """Return whether a session of this model may have begun with another version."""
        return any(known.name == key.name and known != key for known in self._known)

    def add(self, model: ServedModel) -> None:
        """Make a version known before it is served."""
        self._known[model.key] = model

    def serve(
        self, keys: Iterable[ModelKey], aliases: Mapping[str, str], unavailable: Sequence[IndexEntry] = ()
    ) -> list[ModelKey]:
        """Serve exactly these versions, ascending for each model, and return the versions served no longer. Skips unknown keys."""
        before = [model.key for model in self.served]
        self._aliases = aliases
        self.unavailable = unavailable
        self.index = _build_index([self._known[key] for key in keys if key in self._known], aliases)
        after = {model.key for model in self.served}
        return [key for key in before if key not in after]

    def forget(self, key: ModelKey) -> None:
        """Drop a version that no session uses any more."""
        self._known.pop(key, None)


def _build_index(models: Iterable[ServedModel], aliases: Mapping[str, str]) -> ModelIndex:
    by_name: dict[str, dict[str, ServedModel]] = {}
    for model in models:
        by_name.setdefault(model.spec.name, {})[model.version] = model
    index: ModelIndex = dict(by_name)
    for alias, target in aliases.items():
        name, pinned, version = target.partition("/")
        versions = by_name.get(name, {})
        # An alias finds nothing while its target is not served.
        if not pinned and versions:
            index[alias] = versions
        elif version in versions:
            index[alias] = {version: versions[version]}
    return index
