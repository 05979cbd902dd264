"""What every table of model.toml has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(gt=0, strict=True)]
Shapes = dict[str, tuple[int, ...]]


class Table(BaseModel):
    """A table of model.toml: no key is unknown, none changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LayerTable(Table):
    """A layer of an encoder."""

    @property
    def outputs(self) -> int:
        """Width of what comes out."""
        raise NotImplementedError

    def tensors(self, inputs: int) -> Shapes:
        """Name and shape of its tensors when `inputs` is the width of what comes in."""
        raise NotImplementedError

    def steps_for(self, steps: int) -> int:
        """Steps that must come in, at least one, for so many to come out."""
        return steps
