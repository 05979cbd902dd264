"""Launch shapes that were measured: one file for each device beside a family's kernels, with the device's name and the date."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

DEFAULT = "h200"
"""Whose shapes a device takes that was not measured."""


@cache
def tuned(folder: Path, device_name: str) -> Mapping[str, Any]:
    """The file whose name is a word of the device's name, such as h200.json for an NVIDIA H200."""
    words = device_name.lower().split()
    names = [word for word in words if (folder / f"{word}.json").exists()]
    found: Mapping[str, Any] = json.loads((folder / f"{names[0] if names else DEFAULT}.json").read_text())
    return found


def covering(shapes: Sequence[Mapping[str, int]], kinds: Sequence[str], **sizes: int) -> Iterator[tuple[str, int]]:
    """Kind and value of every shape of one of these kinds whose bounds are all at least `sizes`, in order; a bound that a shape does
    not name covers everything."""
    for shape in shapes:
        if all(size <= shape.get(name, size) for name, size in sizes.items()):
            yield from ((kind, shape[kind]) for kind in kinds if kind in shape)
