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
STEPS: dict[str, Any] = {"return_sequences": True}


@dataclass(frozen=True)
class Case:
    """A tested option.

    refused: words of the refusal, or empty if the model imports; more: whether it runs only in tests/long; lengths: steps of the sequences
    with which it is compared; padding: where each sequence of a batch is padded with masked steps in Keras: "post", "pre" or "holes", or
    empty for sequences one by one; suffix: of the file.
    """

    name: str
    build: Build
    refused: str = ""
    more: bool = False
    lengths: Sequence[int] = LENGTHS
    padding: str = ""
    suffix: str = ".keras"

    def __str__(self) -> str:
        return self.name


def over_features(*parts: Layer, steps: int | None = None, features: int = FEATURES) -> Build:
    """Return a Sequential model of these layers, each given the module `keras.layers`."""
    return lambda keras: keras.Sequential([keras.Input((steps, features)), *(part(keras.layers) for part in parts)])


def over_ids(*parts: Layer, mask_zero: bool = False) -> Build:
    """Return a Sequential model of an embedding and these layers."""

    def build(keras: Any) -> Any:
        embedding = keras.layers.Embedding(VOCABULARY, FEATURES, mask_zero=mask_zero)
        return keras.Sequential([keras.Input((None,), dtype="int32"), embedding, *(part(keras.layers) for part in parts)])

    return build


def functional(connect: Callable[[Any, Any], Any], *, ids: bool = False, steps: int | None = None) -> Build:
    """Return a functional model. connect: returns its outputs, given the module `keras` and its input."""

    def build(keras: Any) -> Any:
        start = keras.Input((steps,), dtype="int32") if ids else keras.Input((steps, FEATURES))
        return keras.Model(start, connect(keras, start))

    return build


def one(kind: str, *arguments: Any, **options: Any) -> Layer:
    return lambda layers: getattr(layers, kind)(*arguments, **options)


def cell(kind: str, **options: Any) -> Layer:
    """Return a recurrent layer."""
    return one(kind, UNITS, **options)


def both(kind: str, merge: str | None = "concat", **options: Any) -> Layer:
    """Return a recurrent layer in both directions."""
    return lambda layers: layers.Bidirectional(getattr(layers, kind)(UNITS, **options), merge_mode=merge)


def dense(units: int = 2, activation: str | None = None) -> Layer:
    return one("Dense", units, activation=activation)


def named(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "defaults"


def imports(name: str, *parts: Layer, more: bool = False, steps: int | None = None, features: int = FEATURES) -> Case:
    """Return the case of a Sequential model over features that imports."""
    lengths = (steps, steps) if steps else LENGTHS
    return Case(name, over_features(*parts, steps=steps, features=features), more=more, lengths=lengths)


def refuses(name: str, refused: str, *parts: Layer, steps: int | None = None) -> Case:
    return Case(name, over_features(*parts, steps=steps), refused)
