"""Measured launch shapes: one file for each device in a family's `tuned` folder, with the device's name and the date."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

DEFAULT = "h200"
"""The file for devices that were not measured."""


@cache
def load_tuned(folder: Path, device_name: str) -> Mapping[str, Any]:
    """Return the measured shapes of a device. A word of the device's name is the file's name, such as h200.json for an NVIDIA H200."""
    words = device_name.lower().split()
    names = [word for word in words if (folder / f"{word}.json").exists()]
    content: Mapping[str, Any] = json.loads((folder / f"{names[0] if names else DEFAULT}.json").read_text())
    return content


def matching_shapes(shapes: Sequence[Mapping[str, int]], kinds: Sequence[str], **sizes: int) -> Iterator[tuple[str, int]]:
    """Yield the kind and value of each shape of these kinds in order, if all its bounds are at least `sizes`.

    A bound that a shape does not name is unlimited.
    """
    for shape in shapes:
        if all(size <= shape.get(name, size) for name, size in sizes.items()):
            yield from ((kind, shape[kind]) for kind in kinds if kind in shape)
