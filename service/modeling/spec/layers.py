"""The layers of model.toml, and the tensors of each."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, StrictBool, model_validator

from service.modeling.spec.activations import NONE, SIGMOID, TANH, Activation, ConvActivation
from service.modeling.spec.table import LayerTable, Shapes, Size, Steps

DIRECTIONS = ("forward", "backward")
Direction = Literal["forward", "backward"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Pads = tuple[Steps, Steps]
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
    """`depth` levels of `hidden` units, each in one direction or in both. The output of a bidirectional level is [forward | backward].

    A layer of direction "backward" reads each sequence from its end; its outputs stay in the order of the input.
    """

    hidden: Size
    depth: Annotated[int, Field(gt=0, le=64, strict=True)] = 1
    bidirectional: StrictBool = False
    direction: Direction = "forward"

    @model_validator(mode="after")
    def _directions_agree(self) -> RecurrentLayer:
        if self.bidirectional and self.direction != "forward":
            raise ValueError('a bidirectional layer runs in both directions: remove direction = "backward"')
        return self

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS if self.bidirectional else (self.direction,)

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

    @property
    def states(self) -> dict[str, int] | None:
        """The arrays of the state of one level in one direction and their widths, or None if the state has more than vectors."""
        return {"hidden": self.hidden}

    def weights(self, inputs: int) -> Shapes:
        """Return the name and shape of each tensor of one level in one direction."""
        raise NotImplementedError

    def shared(self, inputs: int) -> Shapes:
        """Return the name and shape of each tensor that the directions of one level share."""
        return {}


class GatedLayer(RecurrentLayer):
    """A recurrent layer with a product of the hidden state at every step.

    `clip` bounds the gate inputs, from -clip to clip. `layer_norm` normalises the input's product without its bias and the recurrent
    product, each over all gates of a step. With `learned_start`, a sequence starts from states in the weights instead of zeros. `merge`
    defines how both directions of a level become its output: concat is [forward | backward], the others combine them number by
    number.
    """

    clip: Positive | None = None
    layer_norm: StrictBool = False
    epsilon: Positive = 1e-5
    learned_start: StrictBool = False
    merge: Literal["concat", "sum", "mean", "product"] = "concat"

    @model_validator(mode="after")
    def _merge_needs_two_directions(self) -> GatedLayer:
        if self.merge != "concat" and not self.bidirectional:
            raise ValueError(f"merge = {self.merge!r} combines two directions: set bidirectional, or remove it")
        return self

    @property
    def vector(self) -> int:
        """Width of the vector that one direction outputs."""
        return self.hidden

    @property
    def outputs(self) -> int:
        return self.vector * (len(self.directions) if self.merge == "concat" else 1)

    def gated_weights(self, inputs: int, gates: int) -> Shapes:
        """Return the tensors that all gated layers have. gates: number of gate blocks."""
        columns = gates * self.hidden
        shapes: Shapes = {"input": (inputs, columns), "recurrent": (self.vector, columns), "bias": (columns,)}
        shapes |= {"input_norm": (2, columns), "recurrent_norm": (2, columns)} if self.layer_norm else {}
        return shapes | ({"start": (self.vector,)} if self.learned_start else {})


class RNNLayer(GatedLayer):
    """h[t] = activation(x[t] @ input + bias + h[t-1] @ recurrent) (Elman 1990)."""

    kind: Literal["rnn"]
    activation: Activation = TANH

    def weights(self, inputs: int) -> Shapes:
        return self.gated_weights(inputs, 1)


class LSTMLayer(GatedLayer):
    """Gate blocks input, forget, cell, output.

    `gate_activation` is applied to the input, forget and output gates, `activation` to the cell gate, `output_activation` to the cell
    before the output gate. With `peepholes`, the previous cell feeds the input and forget gates, and the new cell feeds the output gate. A
    `projection` maps the output to fewer numbers, which are then the hidden state. With `layer_norm`, the new cell is normalised as well.
    """

    kind: Literal["lstm"]
    gate_activation: Activation = SIGMOID
    activation: Activation = TANH
    output_activation: Activation = TANH
    peepholes: StrictBool = False
    projection: Size | None = None

    @property
    def vector(self) -> int:
        return self.projection or self.hidden

    @property
    def states(self) -> dict[str, int]:
        return {"hidden": self.vector, "cell": self.hidden}

    def weights(self, inputs: int) -> Shapes:
        shapes = self.gated_weights(inputs, 4)
        shapes |= {"peephole": (3 * self.hidden,)} if self.peepholes else {}
        shapes |= {"projection": (self.hidden, self.projection)} if self.projection else {}
        shapes |= {"cell_norm": (2, self.hidden)} if self.layer_norm else {}
        return shapes | ({"start_cell": (self.hidden,)} if self.learned_start else {})


class GRULayer(GatedLayer):
    """Gate blocks reset, update, new. With `reset_after`, the reset gate is applied to the recurrent product and its bias."""

    kind: Literal["gru"]
    reset_after: StrictBool = True
    gate_activation: Activation = SIGMOID
    activation: Activation = TANH

    @model_validator(mode="after")
    def _norm_needs_one_product(self) -> GRULayer:
        if self.layer_norm and not self.reset_after:
            raise ValueError("layer_norm normalises one recurrent product, and reset_after = false has two: set reset_after")
        return self

    def weights(self, inputs: int) -> Shapes:
        return self.gated_weights(inputs, 3) | ({"recurrent_bias": (self.hidden,)} if self.reset_after else {})


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

    @property
    def states(self) -> dict[str, int]:
        return {"cell": self.hidden}

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

    @property
    def states(self) -> dict[str, int] | None:
        return {"cell": self.hidden} if self.window == 1 else None

    def weights(self, inputs: int) -> Shapes:
        blocks = QRNN_BLOCKS[self.pooling] * self.hidden
        return {"input": (self.window, inputs, blocks), "bias": (blocks,)}


class MinGRULayer(RecurrentLayer):
    """Blocks candidate, forget: a GRU whose gates do not read the previous state (Feng et al. 2024).

    `candidate` is the function of the candidate v: `positive` is v + 0.5 from 0 on and sigmoid(v) below.
    """

    kind: Literal["mingru"]
    candidate: Literal["positive", "identity"] = "positive"

    @property
    def states(self) -> dict[str, int]:
        return {"cell": self.hidden}

    def weights(self, inputs: int) -> Shapes:
        return {"input": (inputs, 2 * self.hidden), "bias": (2 * self.hidden,)}


class WindowLayer(LayerTable):
    """A layer in which each output reads a window of `width` steps.

    `padding` adds zero steps to each sequence. `same` pads both sides and `causal` the left side so that with stride 1 every step has an
    output. `same_upper` and `same_lower` pad so that a sequence of n steps has ceil(n / stride) outputs; an odd number of steps has one
    more on the right or on the left. `pads` are the steps on the left and on the right; they replace `padding`.
    """

    width: Size
    dilation: Size = 1
    stride: Size = 1
    padding: Literal["same", "same_upper", "same_lower", "causal", "none"] = "same"
    pads: Pads | None = None

    @model_validator(mode="after")
    def _pads_replace_padding(self) -> WindowLayer:
        if self.pads is not None and self.padding != type(self).model_fields["padding"].default:
            raise ValueError("pads and padding are both set: remove one of them")
        return self

    @property
    def reach(self) -> int:
        """Steps from the first to the last step of a window."""
        return (self.width - 1) * self.dilation + 1

    @property
    def pads_by_length(self) -> bool:
        """Whether the number of padding steps depends on the length of the sequence."""
        return self.pads is None and self.padding in ("same_upper", "same_lower") and self.stride > 1

    @property
    def padding_steps(self) -> tuple[int, int]:
        """Zero steps before and after each sequence, unless they depend on its length."""
        if self.pads is not None:
            return self.pads
        around = self.reach - 1
        left = {"same_lower": around - around // 2, "causal": around, "none": 0}.get(self.padding, around // 2)
        return left, 0 if self.padding in ("none", "causal") else around - left

    def steps_for(self, steps: int) -> int:
        if self.pads_by_length:
            return (steps - 1) * self.stride + 1
        return max(1, (steps - 1) * self.stride + self.reach - sum(self.padding_steps))


class ConvLayer(WindowLayer):
    """A convolution over time.

    A gated activation has twice as many maps: values, then their gates. With `weight_norm`, the filters are stored as a direction and
    a magnitude. `batch_norm` is applied before the activation. With `groups`, each group of filters reads its own group of inputs.
    """

    kind: Literal["conv"]
    filters: Size
    activation: ConvActivation = ConvActivation(kind="relu")
    weight_norm: StrictBool = False
    batch_norm: StrictBool = False
    epsilon: Positive = 1e-5
    groups: Size = 1

    @property
    def outputs(self) -> int:
        return self.filters

    @property
    def maps(self) -> int:
        return self.filters * (2 if self.activation.kind in GATED else 1)

    def tensors(self, inputs: int) -> Shapes:
        if inputs % self.groups or self.maps % self.groups:
            raise ValueError(
                f"groups is {self.groups} and must divide the {inputs} inputs and the {self.maps} filters of the layer"
            )
        norm: Shapes = {"norm": (4, self.maps)} if self.batch_norm else {}
        return convolution(self.width, inputs // self.groups, self.maps, weight_norm=self.weight_norm) | norm


class PoolLayer(WindowLayer):
    """The maximum or mean of each window of `width` steps. Padding is no candidate for a maximum; a mean counts it with `count_padding`."""

    kind: Literal["pool"]
    reduce: Literal["max", "mean"]
    padding: Literal["same", "same_upper", "same_lower", "causal", "none"] = "none"
    count_padding: StrictBool = False

    def output_width(self, inputs: int) -> int:
        return inputs

    def tensors(self, inputs: int) -> Shapes:
        return {}


class DenseLayer(LayerTable):
    """activation(x @ weight + bias) at every step."""

    kind: Literal["dense"]
    width: Size
    activation: Activation = NONE

    @property
    def outputs(self) -> int:
        return self.width

    def tensors(self, inputs: int) -> Shapes:
        return {"weight": (inputs, self.width), "bias": (self.width,)}


class ActivationLayer(LayerTable):
    """An activation of every number."""

    kind: Literal["activation"]
    activation: Activation

    def output_width(self, inputs: int) -> int:
        return inputs

    def tensors(self, inputs: int) -> Shapes:
        return {}


class LayerNormLayer(LayerTable):
    """A layer norm of every step: gain and offset."""

    kind: Literal["layer_norm"]
    epsilon: Positive = 1e-5

    def output_width(self, inputs: int) -> int:
        return inputs

    def tensors(self, inputs: int) -> Shapes:
        return {"norm": (2, inputs)}


class BatchNormLayer(LayerTable):
    """A batch norm of every step by stored statistics: gain, offset, mean and variance."""

    kind: Literal["batch_norm"]
    epsilon: Positive = 1e-5

    def output_width(self, inputs: int) -> int:
        return inputs

    def tensors(self, inputs: int) -> Shapes:
        return {"norm": (4, inputs)}


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
    padding: Steps = 0

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
    EmbeddingLayer
    | RNNLayer
    | LSTMLayer
    | GRULayer
    | SRULayer
    | QRNNLayer
    | ConvLayer
    | PoolLayer
    | TCNLayer
    | TextCNNLayer
    | DenseLayer
    | ActivationLayer
    | LayerNormLayer
    | BatchNormLayer
    | MinGRULayer,
    Field(discriminator="kind"),
]
LAYER_KINDS: tuple[str, ...] = tuple(
    get_args(table.model_fields["kind"].annotation)[0] for table in get_args(get_args(Layer)[0])
)


def convolution(width: int, inputs: int, maps: int, *, weight_norm: bool = False) -> Shapes:
    """Return the name and shape of each tensor of one convolution."""
    filters = width, inputs, maps
    return {"bias": (maps,)} | ({"direction": filters, "magnitude": (maps,)} if weight_norm else {"filters": filters})
