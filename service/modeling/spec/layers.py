"""The layers that an encoder is made of, and the tensors that each of them has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, model_validator

from service.modeling.spec.table import LayerTable, Shapes, Size

DIRECTIONS = ("forward", "backward")
QRNN_BLOCKS = {"f": 2, "fo": 3, "ifo": 4}
GATED = ("glu", "gated_tanh")


class EmbeddingLayer(LayerTable):
    """Token ids to vectors of `width`."""

    kind: Literal["embedding"]
    width: Size

    @property
    def outputs(self) -> int:
        return self.width

    def tensors(self, inputs: int) -> Shapes:
        return {"weight": (inputs, self.width)}


class RecurrentLayer(LayerTable):
    """`depth` levels of `hidden` units; a bidirectional level gives [forward | backward] to the next one."""

    hidden: Size
    depth: Size = 1
    bidirectional: StrictBool = False

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS if self.bidirectional else DIRECTIONS[:1]

    @property
    def outputs(self) -> int:
        return self.hidden * len(self.directions)

    def tensors(self, inputs: int) -> Shapes:
        shapes: Shapes = {}
        for level in range(self.depth):
            for direction in self.directions:
                shapes |= {f"{level}.{direction}.{name}": shape for name, shape in self.weights(inputs).items()}
            shapes |= {f"{level}.{name}": shape for name, shape in self.shared(inputs).items()}
            inputs = self.outputs
        return shapes

    def weights(self, inputs: int) -> Shapes:
        """One level in one direction."""
        raise NotImplementedError

    def shared(self, inputs: int) -> Shapes:
        """One level, of all its directions together."""
        return {}


class LSTMLayer(RecurrentLayer):
    """Gate blocks input, forget, cell, output."""

    kind: Literal["lstm"]

    def weights(self, inputs: int) -> Shapes:
        gates = 4 * self.hidden
        return {"input": (inputs, gates), "recurrent": (self.hidden, gates), "bias": (gates,)}


class GRULayer(RecurrentLayer):
    """Gate blocks reset, update, new. With `reset_after` the reset gate is applied to the recurrent product and its bias."""

    kind: Literal["gru"]
    reset_after: StrictBool = True

    def weights(self, inputs: int) -> Shapes:
        gates = 3 * self.hidden
        shapes: Shapes = {"input": (inputs, gates), "recurrent": (self.hidden, gates), "bias": (gates,)}
        return shapes | ({"recurrent_bias": (self.hidden,)} if self.reset_after else {})


class SRULayer(RecurrentLayer):
    """Blocks candidate, forget, reset and, when a skip is wanted and the input has another width than the output, skip.

    `cell_gates` lets the old cell into both gates (version 2); `scale` multiplies a skip that is the input itself; a `projection`
    that is smaller than a level's input and output stands before its product. A layer norm normalises each level's input before
    projection and product, though not the skip that is the input itself, or else each level's whole output after it.
    """

    kind: Literal["sru"]
    activation: Literal["identity", "tanh"] = "identity"
    cell_gates: StrictBool = True
    skip: StrictBool = True
    scale: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    projection: Size | None = None
    layer_norm: Literal["none", "before", "after"] = "none"

    def projected(self, inputs: int) -> int | None:
        """Width of the projection before a level of so many inputs, if it has one."""
        return self.projection if self.projection is not None and self.projection < min(inputs, self.outputs) else None

    def blocks(self, inputs: int) -> int:
        return 4 if self.skip and inputs != self.outputs else 3

    def weights(self, inputs: int) -> Shapes:
        projected = self.projected(inputs)
        shapes: Shapes = {"input": (projected or inputs, self.blocks(inputs) * self.hidden), "bias": (2 * self.hidden,)}
        shapes |= {"projection": (inputs, projected)} if projected else {}
        return shapes | ({"cell": (2 * self.hidden,)} if self.cell_gates else {})

    def shared(self, inputs: int) -> Shapes:
        if self.layer_norm == "none":
            return {}
        return {"norm": (2, inputs if self.layer_norm == "before" else self.outputs)}


class QRNNLayer(RecurrentLayer):
    """Blocks candidate, forget, output, input, as many as `pooling` asks for; tap 0 of the window is the present step."""

    kind: Literal["qrnn"]
    window: Size = 1
    pooling: Literal["f", "fo", "ifo"] = "fo"

    def weights(self, inputs: int) -> Shapes:
        blocks = QRNN_BLOCKS[self.pooling] * self.hidden
        return {"input": (self.window, inputs, blocks), "bias": (blocks,)}


class ConvLayer(LayerTable):
    """A convolution over time. `same` pads both sides, `causal` the left one, so that with stride 1 every step has an output.

    A gated activation has twice the maps: values, then their gates. Of a `weight_norm`, the filters are a direction and a magnitude;
    a `batch_norm` stands before the activation.
    """

    kind: Literal["conv"]
    filters: Size
    width: Size
    dilation: Size = 1
    stride: Size = 1
    padding: Literal["same", "causal", "none"] = "same"
    activation: Literal["none", "relu", "tanh", "gelu", "glu", "gated_tanh"] = "relu"
    weight_norm: StrictBool = False
    batch_norm: StrictBool = False

    @property
    def outputs(self) -> int:
        return self.filters

    @property
    def sides(self) -> tuple[int, int]:
        """Zero steps before and after each row."""
        reach = (self.width - 1) * self.dilation
        return {"same": (reach // 2, reach - reach // 2), "causal": (reach, 0), "none": (0, 0)}[self.padding]

    def tensors(self, inputs: int) -> Shapes:
        maps = self.filters * (2 if self.activation in GATED else 1)
        norm: Shapes = {"norm": (4, maps)} if self.batch_norm else {}
        return convolution(self.width, inputs, maps, weight_norm=self.weight_norm) | norm

    def steps_for(self, steps: int) -> int:
        reach = (self.width - 1) * self.dilation + 1
        return max(1, (steps - 1) * self.stride + reach - sum(self.sides))


class TCNLayer(LayerTable):
    """`levels` of two causal convolutions, each with ReLU, their dilation twice that of the level before; what came in is added, by a
    projection where it has another width, and ReLU stands after that (Bai et al. 2018)."""

    kind: Literal["tcn"]
    filters: Size
    levels: Annotated[int, Field(gt=0, le=16, strict=True)]
    width: Size = 2
    weight_norm: StrictBool = False

    @property
    def outputs(self) -> int:
        return self.filters

    def tensors(self, inputs: int) -> Shapes:
        shapes: Shapes = {}
        for level in range(self.levels):
            for place, columns in enumerate((inputs, self.filters)):
                own = convolution(self.width, columns, self.filters, weight_norm=self.weight_norm)
                shapes |= {f"{level}.{place}.{name}": shape for name, shape in own.items()}
            if inputs != self.filters:
                own = convolution(1, inputs, self.filters)
                shapes |= {f"{level}.projection.{name}": shape for name, shape in own.items()}
            inputs = self.filters
        return shapes


class TextCNNLayer(LayerTable):
    """Convolutions of several widths, each with ReLU and the maximum over time, side by side (Kim 2014).

    Each row gets `padding` zero steps before and after it. What comes out is one vector a row: the head pools by "max".
    """

    kind: Literal["text_cnn"]
    widths: Annotated[tuple[Size, ...], Field(min_length=1)]
    filters: Size
    padding: Annotated[int, Field(ge=0, strict=True)] = 0

    @model_validator(mode="after")
    def _widths_differ(self) -> TextCNNLayer:
        if len(set(self.widths)) != len(self.widths):
            raise ValueError("widths must differ from each other: raise filters instead")
        return self

    @property
    def outputs(self) -> int:
        return self.filters * len(self.widths)

    def tensors(self, inputs: int) -> Shapes:
        filters: Shapes = {f"{width}.filters": (width, inputs, self.filters) for width in self.widths}
        return filters | {f"{width}.bias": (self.filters,) for width in self.widths}

    def steps_for(self, steps: int) -> int:
        return max(1, max(self.widths) - 2 * self.padding)


Layer = Annotated[
    EmbeddingLayer | LSTMLayer | GRULayer | SRULayer | QRNNLayer | ConvLayer | TCNLayer | TextCNNLayer,
    Field(discriminator="kind"),
]
LAYER_KINDS = ("embedding", "lstm", "gru", "sru", "qrnn", "conv", "tcn", "text_cnn")


def convolution(width: int, inputs: int, maps: int, *, weight_norm: bool = False) -> Shapes:
    """Name and shape of the tensors of one convolution."""
    filters = width, inputs, maps
    return {"bias": (maps,)} | ({"direction": filters, "magnitude": (maps,)} if weight_norm else {"filters": filters})
