"""Finds the tensors of a layer in the file, in the order of Keras's `get_weights`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from service.importers.draft import Array, ImportRefused
from service.importers.hdf5 import Hdf5
from service.importers.keras.architecture import LayerConfig, Network

LEGACY_ROOTS = ("model_weights", "")
SEEDS = "seed_generator"
"""The part of a path with the state of a random generator."""
MOST_DIGITS = 6
PARTS = {
    "Bidirectional": ("/forward_layer/cell", "/backward_layer/cell"),
    "TimeDistributed": ("/layer",),
    **dict.fromkeys(("LSTM", "GRU", "SimpleRNN", "RNN"), ("/cell",)),
}
"""Where the tensors of a layer are below its own path, unless they are at the path itself."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a network. paths: returns those of a layer, in order; within: those of a network that is a layer of this network."""

    paths: Callable[[LayerConfig], list[str]]
    within: Callable[[LayerConfig], Weights]


class WeightsFile:
    """The tensors of a file, and which of them no layer has taken."""

    def __init__(self, hdf5: Hdf5) -> None:
        self._hdf5 = hdf5
        self._read: dict[str, Array] = {}
        self._skipped: set[str] = set()

    @property
    def unused(self) -> list[str]:
        known = self._read.keys() | self._skipped
        return [path for path in self._hdf5.tensors if path not in known and SEEDS not in path.split("/")]

    def array(self, path: str) -> Array:
        """Return a tensor. A layer that is called twice reads its tensors once."""
        if path not in self._read:
            self._read[path] = self._hdf5.array(path)
        return self._read[path]

    def skip(self, path: str) -> None:
        """Take a tensor that has no place in a model."""
        self._skipped.add(path)

    def of(self, network: Network) -> Weights:
        """Return the tensors of a model, however the file names them."""
        for root in LEGACY_ROOTS:
            if self._hdf5.texts(root, "layer_names") is not None:
                return _legacy_weights(self._hdf5, root)
        by_place = defaultdict(list)
        for path in self._hdf5.tensors:
            place, _, number = path.rpartition("/vars/")
            if number.isdecimal() and len(number) <= MOST_DIGITS:
                by_place[place].append(path)
        ordered = {place: sorted(paths, key=lambda path: int(path.rpartition("/")[2])) for place, paths in by_place.items()}
        return _numbered_weights(ordered, network, "")


def _numbered_weights(by_place: Mapping[str, list[str]], network: Network, root: str) -> Weights:
    """Return tensors below `layers`, named after the class of their layer and a counter: .keras and .weights.h5.

    by_place: the paths of the tensors at a place, in order.
    """
    places: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for layer in network.layers.values():
        label = snake_case(layer.kind)
        places[layer.name] = f"{root}layers/{label}" + (f"_{counts[label]}" if counts[label] else "")
        counts[label] += not layer.is_operation

    def paths(layer: LayerConfig) -> list[str]:
        return [path for part in PARTS.get(layer.kind, ("",)) for path in by_place.get(places[layer.name] + part, [])]

    def within(layer: LayerConfig) -> Weights:
        assert layer.network is not None, "only a network has layers"
        return _numbered_weights(by_place, layer.network, places[layer.name] + "/")

    return Weights(paths, within)


def _legacy_weights(hdf5: Hdf5, root: str) -> Weights:
    """Return tensors below the name of their layer, in the order of an attribute: .h5."""

    def paths(layer: LayerConfig) -> list[str]:
        group = f"{root}/{layer.name}".lstrip("/")
        paths = [f"{group}/{name}" for name in hdf5.texts(group, "weight_names") or []]
        missing = next((path for path in paths if path not in hdf5.tensors), None)
        if missing is not None:
            raise ImportRefused(f"{hdf5.name} lists the tensor {missing}, which it does not have: save the model again")
        return paths

    return Weights(paths, lambda layer: _legacy_inner_weights(paths(layer)))


def _legacy_inner_weights(paths: list[str]) -> Weights:
    """Return the tensors of a network that is one layer of a .h5 file. The name of an inner layer is a part of the path."""
    weights = Weights(lambda layer: [path for path in paths if layer.name in path.split("/")], lambda _: weights)
    return weights


def snake_case(name: str) -> str:
    """Return the name of a class as Keras writes it into paths."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
