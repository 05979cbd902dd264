"""The base of the descriptors of heads, and what several heads share: labels, pools, dense layers and the linear layer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from service.modeling.spec.activations import NONE, Activation
from service.modeling.spec.heads.fields import AnswerField, Extent
from service.modeling.spec.table import Shapes, Size, Table

Pool = Literal["last", "first", "last_step", "mean", "max", "sum", "attention"]


class HeadState(NamedTuple):
    """Numbers that a head keeps of a sequence. initial: of each number, before the first step."""

    width: int
    initial: float = 0.0


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_written(pools: tuple[str, ...]) -> str | list[str]:
    return pools[0] if len(pools) == 1 else list(pools)


RUNNING_POOLS = {"mean": 0.0, "max": -math.inf}
"""The pools over the steps so far that need a state, with its initial value. The pool "last" needs none."""
Pools = Annotated[tuple[Pool, ...], BeforeValidator(_as_list), PlainSerializer(_as_written), Field(min_length=1)]
"""One pool, written as its name, or a list of pools."""
Labels = Annotated[tuple[str, ...], Field(min_length=1, max_length=1 << 16)]


class HeadTable(Table, ABC):
    """The descriptor of a kind of head: its keys in model.toml, its tensors and states, and the fields of its answer.

    service.modeling.heads computes the answer: pools or steps, a linear layer, `score_function`, `choice`.
    """

    main_output: ClassVar[str | None] = None
    """The name of the head's numbers among arrays and in exported graphs. None if positions are the answer: the numbers are logits."""
    answer_vector: ClassVar[Literal["embedding", "sequence"] | None] = None
    """The vector that is the answer of the head. Other heads return it on request alone."""
    takes_empty: ClassVar[bool] = True
    """Whether the head answers for a sequence without steps."""
    choice: ClassVar[Literal["best", "top", "span"] | None] = None
    """How picks are chosen among the scores: the best of each line, the `top` best, or a span of the lines of a row."""

    @property
    def score_function(self) -> Literal["softmax", "sigmoid", "unit_length"] | Activation | None:
        """The function of the linear layer's scores, or of the vectors of a head without one."""
        return None

    def linear_outputs(self, vocabulary: int | None) -> int:
        """Return the outputs of the linear layer, 0 without one. vocabulary: of the model's input."""
        return 0

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        """Return the name and shape of each tensor. inputs: the width of the last layer."""
        outputs = self.linear_outputs(vocabulary)
        return {"weight": (self.vector_width(inputs), outputs), "bias": (outputs,)} if outputs else {}

    @abstractmethod
    def fields(self, inputs: int) -> tuple[AnswerField, ...]:
        """Return the fields of the answer, in their order. inputs: the width of the last layer."""

    def json_fields(self, inputs: int) -> tuple[AnswerField, ...]:
        """Return the fields that JSON has."""
        return self.fields(inputs)

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools of the vector on which the head works, or none if it works on every step."""
        return ()

    @property
    def answers_steps(self) -> bool:
        """Whether the answer has a line for each step."""
        return any(field.extent is Extent.STEP for field in self.fields(inputs=1))

    def states(self, inputs: int) -> dict[str, HeadState]:
        """Return what the head keeps of a sequence between its chunks, by name. inputs: the width of the last layer."""
        return {}

    def vector_width(self, inputs: int) -> int:
        """Return the width of the vector on which the head works. inputs: the width of the last layer."""
        return inputs

    def check_vocabulary(self, vocabulary: int | None) -> None:
        """Raise ValueError if the head does not fit an input with this vocabulary."""


class Labelled(HeadTable):
    """A head that chooses among `labels`."""

    labels: Labels

    @model_validator(mode="after")
    def _labels_differ(self) -> Labelled:
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("labels must be unique")
        if len(self.labels) == 1 and not getattr(self, "multi_label", False):
            raise ValueError("labels has one label, and softmax would always choose it: add the other labels, or take regress")
        return self


class HeadDense(Table):
    """A dense layer between the pool and the head's own linear layer."""

    width: Size
    activation: Activation = NONE


class PoolingHead(HeadTable):
    """A head that pools the steps of each sequence to one vector, on which its dense layers work.

    `pool` is one pool, or several pools with joined vectors. last: the output after the whole sequence, which a backward
    direction has at the first step; first, last_step: the output at the first and at the last step; attention: the sum of the
    steps with the weights softmax(tanh(x @ weight + bias) @ query), or softmax(x @ query) without `attention_width`.
    """

    pool: Pools
    attention_width: Size | None = None
    dense: Annotated[tuple[HeadDense, ...], Field(max_length=64)] = ()

    @model_validator(mode="after")
    def _pools_are_used(self) -> PoolingHead:
        if len(set(self.pool)) != len(self.pool):
            raise ValueError("pool names a pool twice: remove one")
        if self.attention_width is not None and "attention" not in self.pool:
            raise ValueError('attention_width belongs to the pool "attention": remove it')
        return self

    @property
    def pools(self) -> tuple[str, ...]:
        return self.pool

    def states(self, inputs: int) -> dict[str, HeadState]:
        states: dict[str, HeadState] = {}
        for pool in self.running_pools:
            name = self.state_name(pool)
            states |= {name: HeadState(inputs, RUNNING_POOLS[pool]), f"{name}.steps": HeadState(1)}
        return states

    @property
    def running_pools(self) -> list[str]:
        """The pools that extend over the chunks of a sequence by a state."""
        return [pool for pool in RUNNING_POOLS if pool in self.pool]

    def state_name(self, pool: str) -> str:
        """Return the name of the state of a running pool."""
        return "pool" if len(self.running_pools) == 1 else f"pool.{pool}"

    def vector_width(self, inputs: int) -> int:
        return self.dense[-1].width if self.dense else inputs * len(self.pool)

    def tensors(self, inputs: int, vocabulary: int | None) -> Shapes:
        shapes: Shapes = {}
        if "attention" in self.pool:
            shapes["attention.query"] = (self.attention_width or inputs,)
        if self.attention_width is not None:
            shapes |= {"attention.weight": (inputs, self.attention_width), "attention.bias": (self.attention_width,)}
        columns = inputs * len(self.pool)
        for index, layer in enumerate(self.dense):
            shapes |= {f"dense.{index}.weight": (columns, layer.width), f"dense.{index}.bias": (layer.width,)}
            columns = layer.width
        return shapes | super().tensors(inputs, vocabulary)
