"""The layers of model.toml, and the tensors of each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, model_validator

from service.modeling.spec.table import LayerTable, Shapes, Size

DIRECTIONS = ("forward", "backward")
QRNN_BLOCKS = {"f": 2, "fo": 3, "ifo": 4}
GATED = ("glu", "gated_tanh")
MATRICES = ("weight", "input", "recurrent", "projection", "filters")
"""Last parts of the names of matrices; their last axis has the columns. Direction and magnitude of a weight norm are not matrices: the
filters are computed from both when a model is loaded."""


class EmbeddingLayer(LayerTable):
    """A lookup table from token ids to vectors of `width`."""

    kind: Literal["embedding"]
    width: Size

    @property
    def outputs(self) -> int:
        return self.width

    def tensors(self, inputs: int) -> Shapes:
        return {"weight": (inputs, self.width)}


class RecurrentLayer(LayerTable):
    """`depth` levels of `hidden` units. The output of a bidirectional level is [forward | backward]."""

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
        """Return the name and shape of each tensor of one level in one direction."""
        raise NotImplementedError

    def shared(self, inputs: int) -> Shapes:
        """Return the name and shape of each tensor that the directions of one level share."""
        return {}


class LSTMLayer(RecurrentLayer):
    """Gate blocks input, forget, cell, output."""

    kind: Literal["lstm"]

    def weights(self, inputs: int) -> Shapes:
        gates = 4 * self.hidden
        return {"input": (inputs, gates), "recurrent": (self.hidden, gates), "bias": (gates,)}


class GRULayer(RecurrentLayer):
    """Gate blocks reset, update, new. With `reset_after`, the reset gate is applied to the recurrent product and its bias."""

    kind: Literal["gru"]
    reset_after: StrictBool = True

    def weights(self, inputs: int) -> Shapes:
        gates = 3 * self.hidden
        shapes: Shapes = {"input": (inputs, gates), "recurrent": (self.hidden, gates), "bias": (gates,)}
        return shapes | ({"recurrent_bias": (self.hidden,)} if self.reset_after else {})


class SRULayer(RecurrentLayer):
    """Blocks candidate, forget, reset, and skip if `skip` is set and the input width differs from the output width.

    `cell_gates` feeds the previous cell into both gates (SRU version 2). `scale` multiplies a skip connection that is the input itself.
    A `projection` is applied before a level's product if it is narrower than the level's input and output. `layer_norm` normalises
    each level's input before projection and product, except for a skip connection that is the input itself, or each level's output.
    """

    kind: Literal["sru"]
    activation: Literal["identity", "tanh"] = "identity"
    cell_gates: StrictBool = True
    skip: StrictBool = True
    scale: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    projection: Size | None = None
    layer_norm: Literal["none", "before", "after"] = "none"

    def projected(self, inputs: int) -> int | None:
        """Return the width of the projection of a level with `inputs` inputs, or None if it has none."""
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
    """Blocks candidate, forget, output, input, as far as `pooling` uses them. Tap 0 of the window is the current step."""

    kind: Literal["qrnn"]
    window: Size = 1
    pooling: Literal["f", "fo", "ifo"] = "fo"

    def weights(self, inputs: int) -> Shapes:
        blocks = QRNN_BLOCKS[self.pooling] * self.hidden
        return {"input": (self.window, inputs, blocks), "bias": (blocks,)}


class ConvLayer(LayerTable):
    """A convolution over time. `same` pads both sides, `causal` the left side, so that with stride 1 every step has an output.

    A gated activation has twice as many maps: values, then their gates. With `weight_norm`, the filters are stored as a direction and
    a magnitude. `batch_norm` is applied before the activation.
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
    def padding_steps(self) -> tuple[int, int]:
        """Zero steps before and after each sequence."""
        reach = (self.width - 1) * self.dilation
        return {"same": (reach // 2, reach - reach // 2), "causal": (reach, 0), "none": (0, 0)}[self.padding]

    def tensors(self, inputs: int) -> Shapes:
        maps = self.filters * (2 if self.activation in GATED else 1)
        norm: Shapes = {"norm": (4, maps)} if self.batch_norm else {}
        return convolution(self.width, inputs, maps, weight_norm=self.weight_norm) | norm

    def steps_for(self, steps: int) -> int:
        reach = (self.width - 1) * self.dilation + 1
        return max(1, (steps - 1) * self.stride + reach - sum(self.padding_steps))


class TCNLayer(LayerTable):
    """`levels` of two causal convolutions with ReLU; each level doubles the dilation. The level's input, projected if its width
    differs, is added to its output, followed by ReLU (Bai et al. 2018)."""

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
            for position, columns in enumerate((inputs, self.filters)):
                tensors = convolution(self.width, columns, self.filters, weight_norm=self.weight_norm)
                shapes |= {f"{level}.{position}.{name}": shape for name, shape in tensors.items()}
            if inputs != self.filters:
                tensors = convolution(1, inputs, self.filters)
                shapes |= {f"{level}.projection.{name}": shape for name, shape in tensors.items()}
            inputs = self.filters
        return shapes


class TextCNNLayer(LayerTable):
    """Convolutions of several widths with ReLU, each pooled by its maximum over time, concatenated (Kim 2014).

    Each sequence gets `padding` zero steps before and after it. The output is one vector per sequence, so the head's pool is "max".
    """

    kind: Literal["text_cnn"]
    widths: Annotated[tuple[Size, ...], Field(min_length=1)]
    filters: Size
    padding: Annotated[int, Field(ge=0, strict=True)] = 0

    @model_validator(mode="after")
    def _widths_differ(self) -> TextCNNLayer:
        if len(set(self.widths)) != len(self.widths):
            raise ValueError("widths must be unique: raise filters instead")
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
    """Return the name and shape of each tensor of one convolution."""
    filters = width, inputs, maps
    return {"bias": (maps,)} | ({"direction": filters, "magnitude": (maps,)} if weight_norm else {"filters": filters})
