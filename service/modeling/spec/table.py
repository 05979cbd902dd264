"""The base classes of the tables in model.toml."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(gt=0, le=1 << 16, strict=True)]
Count = Annotated[int, Field(gt=0, lt=1 << 31, strict=True)]
"""A number that may be larger than a size: of token ids, or of time steps."""
Steps = Annotated[int, Field(ge=0, le=1 << 16, strict=True)]
Shapes = dict[str, tuple[int, ...]]


class Table(BaseModel):
    """A table of model.toml: immutable, unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LayerTable(Table):
    """A layer of an encoder."""

    def output_width(self, inputs: int) -> int:
        """Return the width of the output. inputs: the input width."""
        return self.outputs

    @property
    def outputs(self) -> int:
        """Width of the output, for layers that decide it."""
        raise NotImplementedError

    def tensors(self, inputs: int) -> Shapes:
        """Return the name and shape of each tensor of this layer. inputs: the input width."""
        raise NotImplementedError

    def steps_for(self, steps: int) -> int:
        """Return how many input steps, at least one, are needed for `steps` output steps."""
        return steps
