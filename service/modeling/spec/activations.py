"""Activations of model.toml: a name, or a table with a name and parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from service.modeling.spec.table import Table

Parameter = Annotated[float, Field(allow_inf_nan=False)]

Kind = Literal[
    "none",
    "sigmoid",
    "tanh",
    "relu",
    "relu6",
    "leaky_relu",
    "thresholded_relu",
    "elu",
    "selu",
    "gelu",
    "gelu_tanh",
    "silu",
    "softplus",
    "softsign",
    "hard_sigmoid",
    "hard_tanh",
    "clip",
    "scaled_tanh",
    "affine",
    "exponential",
]
Gated = Literal["glu", "gated_tanh"]

PARAMETERS: dict[str, dict[str, float]] = {
    "leaky_relu": {"alpha": 0.01},
    "thresholded_relu": {"alpha": 1.0},
    "elu": {"alpha": 1.0},
    "hard_sigmoid": {"alpha": 0.2, "beta": 0.5},
    "scaled_tanh": {"alpha": 1.0, "beta": 1.0},
    "affine": {"alpha": 1.0, "beta": 0.0},
    "clip": {"alpha": 0.0, "beta": 1.0},
}
"""The parameters of each activation that has any, with their defaults, which are those of ONNX."""


def class_name(kind: str) -> str:
    """Return the name of an activation as a class: LeakyRelu for leaky_relu."""
    return "".join(part.title() for part in kind.split("_"))


_OF_RECURRENT = ("sigmoid", "tanh", "relu", "softplus", "softsign", *PARAMETERS)
ONNX_RECURRENT = {kind: class_name(kind) for kind in _OF_RECURRENT if kind != "clip"}
"""Activations by their names in the recurrent operators of ONNX."""
ONNX = {kind: name for kind, name in ONNX_RECURRENT.items() if kind not in ("scaled_tanh", "affine")}
ONNX |= {"selu": "Selu", "exponential": "Exp"}
"""Activations that are one operator of ONNX, with attributes of the same names."""


class Activation(Table):
    """`activation = "tanh"`, or with parameters, `activation = { kind = "hard_sigmoid", alpha = 0.2, beta = 0.5 }`.

    The functions are in `kernels.activations`.
    """

    kind: Kind
    alpha: Parameter | None = None
    beta: Parameter | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_is_enough(cls, value: Any) -> Any:
        if not isinstance(value, str | dict | Activation):
            raise ValueError('write the name of an activation, or a table such as { kind = "elu", alpha = 0.5 }')
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _parameters_belong_to_the_kind(self) -> Activation:
        known = PARAMETERS.get(self.kind, {})
        for name in ("alpha", "beta"):
            if getattr(self, name) is not None and name not in known:
                raise ValueError(f"{self.kind} has no parameter {name}: remove it")
        if self.kind == "clip" and self.parameters[0] >= self.parameters[1]:
            raise ValueError("clip keeps no number between alpha and beta: alpha must be below beta")
        return self

    @model_serializer
    def _as_written(self) -> str | dict[str, Any]:
        given = {name: getattr(self, name) for name in ("alpha", "beta") if getattr(self, name) is not None}
        return {"kind": self.kind, **given} if given else self.kind

    @property
    def parameters(self) -> tuple[float, ...]:
        """The values of the parameters of this kind, in order."""
        return tuple(
            default if getattr(self, name) is None else getattr(self, name)
            for name, default in PARAMETERS.get(self.kind, {}).items()
        )


class ConvActivation(Activation):
    """An activation, or a function of a value and its gate: value * sigmoid(gate), or tanh(value) * sigmoid(gate)."""

    kind: Literal[Kind, Gated]  # type: ignore[assignment]  # pydantic checks each class by itself


NONE, SIGMOID, TANH, RELU = (Activation(kind=kind) for kind in ("none", "sigmoid", "tanh", "relu"))
