"""Builds Keras models for tests. Loads neither Keras nor the service: the functions receive the module `keras`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

FEATURES, VOCABULARY, UNITS = 3, 11, 4
LENGTHS = (7, 12, 5)
Build = Callable[[Any], Any]
"""Returns a model, given the module `keras`."""
Layer = Callable[[Any], Any]
"""Returns a layer, given the module `keras.layers`."""


@dataclass(frozen=True)
class Case:
    """A tested option.

    part: a layer of Keras, or several that belong together; option: the tested option; build: returns the model, given the module `keras`;
    refused: words of the refusal, or empty if the model imports; lengths: steps of the sequences with which it is compared;
    padding: where each sequence of a batch is padded with masked steps in Keras: "post", "pre" or "holes", or empty for sequences one by
    one; suffix: of the file.
    """

    part: str
    option: str
    build: Build
    refused: str = ""
    lengths: Sequence[int] = LENGTHS
    padding: str = ""
    suffix: str = ".keras"

    def __str__(self) -> str:
        return f"{self.part}: {self.option}"


def written(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def over_features(*parts: Layer, steps: int | None = None, features: int = FEATURES) -> Build:
    """Return a Sequential model of these layers, each given the module `keras.layers`."""
    return lambda keras: keras.Sequential([keras.Input((steps, features)), *(part(keras.layers) for part in parts)])


def over_ids(*parts: Layer, mask_zero: bool = False, steps: int | None = None) -> Build:
    """Return a Sequential model of an embedding and these layers."""

    def build(keras: Any) -> Any:
        embedding = keras.layers.Embedding(VOCABULARY, FEATURES, mask_zero=mask_zero)
        start = keras.Input((steps,), dtype="int32")
        return keras.Sequential([start, embedding, *(part(keras.layers) for part in parts)])

    return build


def functional(connect: Callable[[Any, Any], Any], *, steps: int | None = None, features: int = FEATURES) -> Build:
    """Return a functional model. connect: returns its outputs, given `keras.layers` and its input."""

    def build(keras: Any) -> Any:
        start = keras.Input((steps, features))
        return keras.Model(start, connect(keras.layers, start))

    return build


def one(kind: str, **options: Any) -> Layer:
    return lambda layers: getattr(layers, kind)(**options)


def cell(kind: str, **options: Any) -> Layer:
    """Return a recurrent layer."""
    return one(kind, units=UNITS, **options)


def both(kind: str, merge: str | None = "concat", **options: Any) -> Layer:
    """Return a recurrent layer in both directions."""
    return lambda layers: layers.Bidirectional(getattr(layers, kind)(UNITS, **options), merge_mode=merge)


def dense(units: int = 2, activation: str | None = None) -> Layer:
    return one("Dense", units=units, activation=activation)


STEPS: dict[str, Any] = {"return_sequences": True}
