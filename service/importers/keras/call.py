"""Defines the call of a layer with its inputs, which the functions that translate layers receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.importers.chain.reading import Reading
from service.importers.chain.signal import Role, Signal
from service.importers.draft import Array, ImportRefused
from service.importers.keras.architecture import LayerCall, LayerConfig
from service.importers.keras.weights import WeightsFile

REQUIRED: Any = object()
LARGEST_NUMBER = 1e30


@dataclass(frozen=True, slots=True, eq=False)
class KerasTensor:
    """A tensor that depends on the sequence. is_masked: Keras skips some of its steps."""

    signal: Signal
    is_masked: bool = False


@dataclass(frozen=True, slots=True)
class KerasMask:
    """The steps that Keras does not skip."""


@dataclass(frozen=True, slots=True)
class KerasFinalCell:
    """The final cell state of an LSTM, which no layer can use."""


Value = KerasTensor | KerasMask | KerasFinalCell


@dataclass(slots=True, kw_only=True)
class KerasReading(Reading):
    """How the model is read. is_keras_2: whether Keras 2 or older wrote it; takes_ids: whether its input is token ids."""

    file: WeightsFile
    is_keras_2: bool
    takes_ids: bool


@dataclass(slots=True)
class KerasCall:
    """One call of a layer. inputs: tensors, and numbers of an operation; paths: of the layer's tensors in the file, in order."""

    layer: LayerConfig
    node: LayerCall
    inputs: Sequence[Value | float]
    paths: Sequence[str]
    reading: KerasReading
    origins: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """The layer as messages name it."""
        return f"{self.layer.kind} {self.layer.name}"

    @property
    def config(self) -> Mapping[str, Any]:
        return self.layer.config

    @property
    def tensor(self) -> KerasTensor:
        """The only input."""
        if len(self.inputs) != 1 or not isinstance(self.inputs[0], KerasTensor):
            raise ImportRefused("it takes several tensors, or a tensor that is not the output of a layer")
        return self.inputs[0]

    @property
    def signal(self) -> Signal:
        return self.tensor.signal

    @property
    def tensors(self) -> list[KerasTensor]:
        """All inputs."""
        found = [value for value in self.inputs if isinstance(value, KerasTensor)]
        if not found or len(found) < len(self.inputs):
            raise ImportRefused("it takes a tensor that is not the output of a layer")
        return found

    def result(self, signal: Signal) -> KerasTensor:
        """Return a result with the mask of the inputs."""
        return KerasTensor(signal, any(isinstance(value, KerasTensor) and value.is_masked for value in self.inputs))

    def ignores_mask(self) -> None:
        """Note that the layer computes with padding although a mask excludes it."""
        if any(isinstance(value, KerasTensor) and value.is_masked and value.signal.has_steps for value in self.inputs):
            self.reading.note(
                f"{self.label} ignores the mask: in a batch with padding, Keras computes with padding here, which the model does not have"
            )

    def weights(self, *names: str, unread: int = 0) -> list[Array]:
        """Return the tensors of the layer, and remember them as origins. unread: how many more it has, which are not needed."""
        if len(self.paths) != len(names) + unread:
            found = ", ".join(self.paths) or "none"
            raise ImportRefused(f"it has {len(names)} tensors, {', '.join(names) or 'none'}, and the file has {found}")
        self.origins = frozenset(f"{self.layer.name}.{name}" for name in names)
        for path in self.paths[len(names) :]:
            self.reading.file.skip(path)
        return [self.reading.file.array(path) for path in self.paths[: len(names)]]

    def value(self, key: str, default: Any = REQUIRED) -> Any:
        """Return an option of the layer."""
        found = self.config.get(key, self.node.options.get(key, default))
        if found is REQUIRED:
            raise ImportRefused(f"it has no option {key}: save the model with a current Keras")
        return found

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool | int):
            raise self._refused(key, value)
        return bool(value)

    def number(self, key: str, default: Any = REQUIRED) -> float:
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_NUMBER:
            raise self._refused(key, value)
        return float(value)

    def integer(self, key: str, default: Any = REQUIRED) -> int:
        """Return an option of a whole number, also if it is written as a list of one."""
        value = self.value(key, default)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refused(key, value)
        return value

    def axis(self, rank: int, default: Any = REQUIRED) -> int:
        """Return the option `axis` as the number of an axis of a tensor."""
        axis = self.integer("axis", default)
        if not -rank <= axis < rank:
            raise ImportRefused(f"its axis is {axis}, and its tensor has {rank} axes")
        return axis % rank

    def over_steps(self) -> Signal:
        """Return the only input, which has a batch, steps and columns."""
        self.signal.expect(Role.BATCH, Role.STEPS, Role.COLUMNS)
        return self.signal

    def integers(self, key: str) -> list[int]:
        """Return an option with a list of whole numbers."""
        value = self.value(key)
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise self._refused(key, value)
        return value

    def pair(self) -> tuple[KerasTensor, KerasTensor]:
        """Return both inputs."""
        tensors = self.tensors
        if len(tensors) != 2:
            raise ImportRefused(f"it takes two tensors, and has {len(tensors)}")
        return tensors[0], tensors[1]

    def refuse_options(self, **allowed: object) -> None:
        """Raise ImportRefused for options with another value than the allowed value."""
        for name, value in allowed.items():
            if self.config.get(name, value) != value:
                raise self._refused(name, self.config[name])

    def _refused(self, key: str, value: Any) -> ImportRefused:
        return ImportRefused(f"its option {key} is {value!r:.60}, which cannot be imported")
