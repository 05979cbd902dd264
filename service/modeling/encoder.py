"""The encoder: one model version on a device, from its input to the output of its head."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.backend import AUTO as ANY_BACKEND
from kernels.backend import PINNED
from kernels.persistent.resident import Resident
from kernels.ragged import ContractError, Encoded, Outputs, Ragged
from service.errors import ModelError
from service.modeling import folding, layer_builder
from service.modeling.heads import HeadOutput, RunnableHead
from service.modeling.layer_builder import EncoderPart, NamedLayer
from service.modeling.recurrent import RecurrentStack
from service.modeling.runnable_layer import RunnableLayer, device_bytes
from service.modeling.spec import ModelSpec
from service.modeling.spec.layers import EmbeddingLayer
from service.modeling.state_slabs import RowSlots, StateSlabs, state_arrays
from service.modeling.stored_weights import INT8


@dataclass(frozen=True, slots=True)
class Encoding:
    """The output of a model for a batch.

    head_output: the output of the head; sequence: (steps, width) float32, the last layer's steps, if they were requested;
    offsets: (rows + 1,) where the steps of each row begin in outputs that have one entry per step.
    """

    head_output: HeadOutput
    sequence: Tensor | None
    offsets: Tensor


class Encoder:
    """One version of one model, ready to run on `device`."""

    def __init__(self, spec: ModelSpec, arrays: Mapping[str, Tensor], device: torch.device) -> None:
        self.spec = spec
        self.device = device
        int8 = spec.precision == INT8
        if int8 and device.type == "cuda":
            arrays, int8 = _in_float16(arrays), False
        self._parts = layer_builder.build_parts(
            _named_layers(spec, arrays), device, int8=int8, requested=PINNED if spec.pin_backend else ANY_BACKEND
        )
        self._head = RunnableHead(spec.head, arrays, device)
        self._wants_steps = replace(self._head.wants, steps=True)
        self._layers[-1].linear = self._head.linear
        self.whole_only = self._needing_whole_sequences()
        """The layers and the head that need a whole sequence, each with its kind. With none, a sequence may arrive in chunks."""
        self._slabs: StateSlabs | None = None
        if isinstance(spec.layers[0], EmbeddingLayer):
            first, table = self._layers[0], arrays["layers.0.weight"].to(device)
            columns = None if spec.fold == "never" else first.folded_columns
            folds = columns is not None and folding.is_folded(len(table), columns)
            (first.fold if folds else first.embed)(table)

    @property
    def streams(self) -> bool:
        """Whether a sequence may arrive in chunks."""
        return not self.whole_only

    @property
    def keeps_states(self) -> bool:
        """Whether sequences may have state slots."""
        return self.streams or bool(self.spec.states)

    @property
    def resumes_for_free(self) -> bool:
        """Whether a batch that resumes from state slots takes no longer than a batch that starts from zeros."""
        return all(layer.resumes_for_free for layer in self._layers)

    def allocate_states(self, slots: int) -> None:
        """Allocate the state slabs of sequences that arrive in chunks. `slots` includes ZERO_SLOT and DISCARD_SLOT."""
        self._slabs = StateSlabs(
            [layer.allocate_states(slots) for layer in self._layers],
            self._head.allocate_states(slots, self.spec.output_width, self.device),
        )

    def resident(self) -> Resident:
        """Return the kernel that stays on the device and runs this model step by step, on the allocated states; raises ContractError for a
        model that it does not run."""
        stack, linear = self._parts[0].layer, self._head.newest_alone
        fits = self.streams and len(self._parts) == 1 and self.spec.input.features is not None
        if not fits or not isinstance(stack, RecurrentStack) or linear is None:
            raise ContractError("a resident kernel runs one recurrent layer over features, and a head over its newest step")
        return stack.resident(self._allocated_slabs().parts[0], *linear)

    def state_bytes(self) -> int:
        """Return the bytes of one state slot."""
        self.allocate_states(1)
        return sum(slab.nbytes for slab in self._allocated_slabs().slabs().values())

    def state_numbers(self) -> list[Tensor]:
        """Return the state slabs of floating-point numbers as (slots, numbers)."""
        return [] if self._slabs is None else self._slabs.numbers()

    @torch.inference_mode()
    def save(self, slots: NDArray[np.integer[Any]]) -> dict[str, Tensor]:
        """Return the states in some slots, (slots, ...) each, on the host, by layer and array name."""
        index = torch.from_numpy(slots).to(self.device)
        return {name: slab.index_select(0, index).cpu() for name, slab in self._allocated_slabs().slabs().items()}

    @torch.inference_mode()
    def restore(self, slots: NDArray[np.integer[Any]], states: Mapping[str, Tensor]) -> None:
        """Write states that `save` returned into as many slots."""
        index = torch.from_numpy(slots).to(self.device, torch.int64)
        for name, slab in self._allocated_slabs().slabs().items():
            slab.index_copy_(0, index, states[name].to(slab))

    @torch.inference_mode()
    def state_vectors(self, slots: NDArray[np.integer[Any]]) -> Tensor:
        """Return the states of `spec.states` in some slots, joined in their order, on the host: (slots, numbers) float32."""
        states, names = self.save(slots), self._slab_names()
        return torch.cat([states[names[name]].float() for name in self.spec.states], dim=1)

    @torch.inference_mode()
    def state_from(self, vector: Tensor, slot: int) -> dict[str, Tensor]:
        """Return the state in a slot, with these states of `spec.states` in it.

        vector: (numbers,) float32, joined in the order of `spec.states`. NaN keeps the number in the slot.
        """
        state = {name: states[0] for name, states in self.save(np.array([slot], np.int32)).items()}
        names = self._slab_names()
        for name, given in zip(self.spec.states, torch.split(vector, list(self.spec.states.values())), strict=True):
            usual = state[names[name]]
            state[names[name]] = torch.where(given.isnan(), usual, given.to(usual.dtype))
        return state

    def _slab_names(self) -> dict[str, str]:
        """Return the name in `save` of each state of `spec.states`."""
        names = {}
        for number, part in enumerate(self._parts):
            if isinstance(part.layer, RecurrentStack):
                for index, place in enumerate(part.layer.state_names):
                    for array in ("hidden", "cell"):
                        names[f"{part.names[0]}.{place}.{array}"] = f"{number}.{index}.{array}"
        return names

    def __call__(self, x: Ragged, *, sequence: bool = False, slots: RowSlots | None = None) -> Encoding:
        """Run the model on a batch.

        x.data: (tokens,) ids or (tokens, features) float32; sequence: return every step of the last layer as well;
        slots: where the states of the rows are read and written, or None to start every row from zeros and keep no state.
        """
        want = self._wants_steps if sequence else self._head.wants
        with torch._C._InferenceMode(True):  # torch.inference_mode() enters it with six more calls, as long as a small kernel
            for number in range(len(self._parts) - 1):
                encoded = self._run_part(number, x, Outputs(steps=True), slots)
                assert encoded.steps is not None
                x = Ragged(encoded.steps, x.offsets if encoded.offsets is None else encoded.offsets)
            encoded = self._run_part(len(self._parts) - 1, x, want, slots)
            offsets = x.offsets if encoded.offsets is None else encoded.offsets
            return Encoding(self._head(encoded, offsets, slots), encoded.steps if sequence else None, offsets)

    @torch.inference_mode()
    def run_with_states(
        self, x: Ragged, initial: Mapping[str, Tensor], *, sequence: bool = False
    ) -> tuple[Encoding, dict[str, Tensor]]:
        """Run the model on whole rows from given states; return the encoding and the states after the rows.

        x, sequence: as in a call. States are (rows, width) by layer, level, direction and array, such as `layers.1.0.forward.hidden`. A row
        starts as usual from a state that is not given. Raises ValueError for a state that no layer has, or that has another shape.
        """
        want = self._wants_steps if sequence else self._head.wants
        unknown = set(initial)
        final: dict[str, Tensor] = {}
        for part in self._parts:
            part_want = want if part is self._parts[-1] else Outputs(steps=True)
            if isinstance(part.layer, RecurrentStack):
                states = part.layer.allocate_states(x.rows)
                for name, array in _named(part, states).items():
                    if name in unknown:
                        _fill(name, array, initial[name])
                unknown -= _named(part, states).keys()
                encoded, states = part.layer.run_chunk(x, part_want, states)
                final |= _named(part, states)
            else:
                encoded = part.layer(x, part_want)
            offsets = x.offsets if encoded.offsets is None else encoded.offsets
            x = x if encoded.steps is None else Ragged(encoded.steps, offsets)
        if unknown:
            raise ValueError(f"no recurrent layer has the state {min(unknown)!r}: the states are {', '.join(final) or 'none'}")
        return Encoding(self._head(encoded, offsets), encoded.steps if sequence else None, offsets), final

    @torch.inference_mode()
    def run_without_steps(self) -> Encoding | None:
        """Return the encoding of one sequence without steps: the head over zeros. None for a model that needs a step.

        No layer runs. Every pool of no steps is zero.
        """
        if not self.spec.takes_empty:
            return None
        zeros = torch.zeros(1, self.spec.output_width, device=self.device)
        encoded = Encoded(None, steps=zeros[:0], last=zeros, mean=zeros, max=zeros)
        offsets = torch.zeros(2, dtype=torch.int32, device=self.device)
        return Encoding(self._head(encoded, offsets), encoded.steps if self.spec.has_steps else None, offsets)

    @torch.inference_mode()
    def logits(self, vectors: Tensor) -> Tensor | None:
        """Return the scores of the head's linear layer, (lines, n) float32, or None without one. vectors: (lines, width)."""
        return self._head.logits(vectors)

    @torch.inference_mode()
    def scores(self, logits: Tensor) -> Tensor:
        """Return the answers of the head for the scores of its linear layer."""
        return self._head.scores(logits)

    @torch.inference_mode()
    def answers(self, logits: Tensor, offsets: Tensor) -> HeadOutput:
        """Return the output of the head for the scores of its linear layer, (lines, n). offsets: (rows + 1,) where the steps begin."""
        return self._head.answers(logits, offsets)

    def backends(self) -> dict[str, str]:
        """Return the kernel backend of each layer, by layer name; for an embedding, how its ids are looked up."""
        takes_ids = self._layers[0].takes_ids
        embedding = {"layers.0": takes_ids} if takes_ids is not None else {}
        return embedding | {name: part.layer.backend() for part in self._parts for name in part.names}

    def weight_bytes(self) -> int:
        """Return the bytes of weights and tables on the device, without states."""
        return device_bytes([tensor for layer in self._layers for tensor in layer.tensors()] + self._head.tensors())

    def time_batch(self, rows: int, steps: int) -> float:
        """Return the seconds that a made-up batch of equal rows takes. Rows have at least the model's minimum number of steps."""
        x = self._made_up_batch(rows, steps)
        start = time.perf_counter()
        self(x)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _needing_whole_sequences(self) -> tuple[str, ...]:
        kinds = {f"layers.{index}": layer.kind for index, layer in enumerate(self.spec.layers)}
        layers = [f"{name} ({kinds[name]})" for part in self._parts for name in part.whole_only]
        return (*layers, *([] if self._head.streams else [f"head ({self.spec.head.kind})"]))

    def _run_part(self, number: int, x: Ragged, want: Outputs, slots: RowSlots | None) -> Encoded:
        layer = self._parts[number].layer
        if slots is None:
            return layer(x, want)
        return layer.run_chunk(x, want, self._allocated_slabs().states(number, slots))[0]

    @property
    def _layers(self) -> list[RunnableLayer]:
        return [part.layer for part in self._parts]

    def _allocated_slabs(self) -> StateSlabs:
        assert self._slabs is not None, "call allocate_states() first"
        return self._slabs

    def _made_up_batch(self, rows: int, steps: int) -> Ragged:
        steps = max(steps, self.spec.min_steps)
        offsets = torch.arange(rows + 1, device=self.device, dtype=torch.int32) * steps
        if self.spec.input.features is not None:
            return Ragged(torch.zeros(rows * steps, self.spec.input.features, device=self.device), offsets)
        ids = torch.arange(rows * steps, device=self.device, dtype=torch.int32) % (self.spec.input.vocabulary or 1)
        return Ragged(ids, offsets)


def _named(part: EncoderPart, states: Sequence[Any]) -> dict[str, Tensor]:
    """Return the arrays of the states of a recurrent stack by name."""
    assert isinstance(part.layer, RecurrentStack)
    return {
        f"{part.names[0]}.{place}.{name}": array
        for place, state in zip(part.layer.state_names, states, strict=True)
        for name, array in state_arrays(state).items()
    }


def _fill(name: str, array: Tensor, given: Tensor) -> None:
    if given.shape != array.shape:
        raise ValueError(f"the state {name!r} has the shape {tuple(given.shape)}, expected {tuple(array.shape)}")
    array.copy_(given)


def _named_layers(spec: ModelSpec, arrays: Mapping[str, Tensor]) -> list[NamedLayer]:
    """Return the layers after the embedding, or all layers if there is none. A model of an embedding alone has one layer."""
    named_layers = []
    inputs = spec.input.vocabulary or spec.input.features or 0
    for index, layer in enumerate(spec.layers):
        name = f"layers.{index}"
        if not isinstance(layer, EmbeddingLayer) or len(spec.layers) == 1:
            named_layers.append(NamedLayer(name, layer, inputs, _without_prefix(arrays, f"{name}.")))
        inputs = layer.output_width(inputs)
    return named_layers


def _in_float16(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the arrays of an int8 model in the dtype of the kernels of a GPU; raises ModelError for values that float16 does not have."""
    halves = {name: array.half() for name, array in arrays.items()}
    for name, array in halves.items():
        if not bool(torch.isfinite(array).all()):
            raise ModelError(
                f"{name} has values above the range of float16, in which a GPU runs int8 models: store it in bfloat16"
            )
    return halves


def _without_prefix(arrays: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the arrays with this prefix in their names, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
