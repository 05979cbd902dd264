"""Reads the recipe of an import: settings of model.toml that a checkpoint lacks.

A recipe is a TOML file with any of the keys of model.toml. Its `[input]`, `[head]` and top-level keys complete or replace what the importer
found. For a checkpoint that has only tensors, its `[[layers]]` name the tensors of each layer with `from`, the start of their names.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from service.importers.draft import ImportRefused
from service.modeling.spec.files import read_file

FROM, ATTENTION_FROM = "from", "attention_from"


@dataclass(frozen=True, slots=True)
class Recipe:
    """tables: the recipe without layers; layers: its layers, and dense: the dense layers of its head, each with `from`; head_from: the
    start of the names of the head's own tensors; attention_from: the start of the names of its attention's tensors."""

    tables: dict[str, Any] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    dense: list[dict[str, Any]] = field(default_factory=list)
    head_from: str | None = None
    attention_from: str | None = None

    @property
    def head(self) -> dict[str, Any]:
        """The keys of the head, without its dense layers."""
        head: dict[str, Any] = self.tables.get("head", {})
        return head

    @classmethod
    def read(cls, file: Path) -> Recipe:
        """Read a recipe; raises ImportRefused if it is no TOML or has a wrong form."""
        try:
            tables = tomllib.loads(read_file(file).decode())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ImportRefused(f"{file}: {error}") from error
        layers, head = tables.pop("layers", []), tables.get("head", {})
        if (
            not isinstance(tables.get("input", {}), dict)
            or not isinstance(head, dict)
            or not _are_tables(layers)
            or not _are_tables(head.get("dense", []))
        ):
            raise ImportRefused(
                f"{file}: write layers as [[layers]], the head as [head] and its dense layers as [[head.dense]]"
            )
        return cls(tables, layers, head.pop("dense", []), head.pop(FROM, None), head.pop(ATTENTION_FROM, None))

    def completed(self, labels: Path | None, max_steps: int | None) -> Recipe:
        """Return the recipe with the labels in a file, one in each line, and the longest sequence; raises ImportRefused for the file."""
        tables = dict(self.tables)
        if max_steps is not None:
            tables["input"] = {**tables.get("input", {}), "max_steps": max_steps}
        if labels is not None:
            try:
                lines = read_file(labels).decode().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ImportRefused(f"{labels} cannot be read as lines of text: {error}") from error
            tables["head"] = {**self.head, "labels": [line.strip() for line in lines if line.strip()]}
        return replace(self, tables=tables)


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
