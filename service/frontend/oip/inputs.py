"""The input tensors of an Open Inference Protocol request, packed end to end for the engine. `validation` checks their values.

A request holds a single sequence, sequences that are padded to the longest and come with `lengths`, or sequences that are packed
end to end and come with `offsets`. Padding is removed here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidInput
from service.frontend.oip import metadata
from service.frontend.oip.metadata import INTEGERS, LENGTHS, OFFSETS, STATE, VALUE_INPUTS
from service.frontend.oip.tensors import BYTES, Tensor, tensor_error
from service.frontend.run import validation
from service.frontend.run.catalog import ServedModel
from service.frontend.run.validation import PackedInputs
from service.settings import Settings

Array = NDArray[Any]

ID_BYTES = 4


class InputTensors:
    """The inputs of one request by name. Exactly one holds the values. ragged: its sequences are packed end to end."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        """Raises InvalidInput for two tensors with the same name."""
        self._tensors: dict[str, Tensor] = {}
        for tensor in inputs:
            if tensor.name in self._tensors:
                raise tensor_error(tensor.name, "is sent twice: send each input once")
            self._tensors[tensor.name] = tensor
        self.values_name = values_name(self._tensors)
        self.ragged = OFFSETS in self._tensors

    @property
    def tensors(self) -> list[Tensor]:
        """Return the inputs in their order."""
        return list(self._tensors.values())

    @property
    def value_bytes(self) -> int:
        """Return the size of all arrays."""
        return sum(0 if isinstance(tensor.values, list) else tensor.values.nbytes for tensor in self._tensors.values())

    @property
    def text_bytes(self) -> int:
        """Return the size of all texts, whose tokenisation takes longer than the checks of arrays."""
        return sum(sum(map(len, tensor.values)) for tensor in self._tensors.values() if isinstance(tensor.values, list))

    def pack(self, model: ServedModel, settings: Settings) -> PackedInputs:
        """Validate the inputs and return their sequences; raises InvalidInput or TooLarge with the name of the invalid input."""
        self._check_names(model)
        packed = self._pack_values(model, settings)
        states = {name: tensor for name, tensor in self._tensors.items() if name.startswith(STATE)}
        return _with_states(packed, states, model) if states else packed

    def _pack_values(self, model: ServedModel, settings: Settings) -> PackedInputs:
        values = self._tensors[self.values_name]
        lengths, offsets = self._tensors.get(LENGTHS), self._tensors.get(OFFSETS)
        if lengths is not None and offsets is not None:
            problem = "and offsets cannot be combined: send lengths with padded sequences, or offsets with packed sequences"
            raise tensor_error(LENGTHS, problem)
        if values.datatype == BYTES:
            if lengths is not None or offsets is not None:
                raise tensor_error(LENGTHS if offsets is None else OFFSETS, "does not apply to text: leave it out")
            return self._tokenize(values, model, settings)
        sequences = _with_sequence_dimension(values, model)
        validation.check_input_count(len(sequences) if offsets is None else offsets.shape[-1] - 1, settings, values.name)
        flat, steps = _split_packed(values, sequences, offsets) if offsets is not None else _remove_padding(sequences, lengths)
        for index, count in enumerate(steps):
            validation.check_steps(count, f"{values.name}[{index}]", model)
        validate = validation.engine_ids if model.spec.input.features is None else validation.engine_features
        packed = np.ascontiguousarray(validate(flat, _step_names(values.name, steps), model))
        return PackedInputs(steps, packed.data.cast("B") if packed.size else b"")  # a view of no values cannot be cast

    def _check_names(self, model: ServedModel) -> None:
        """Raise InvalidInput unless the model takes these inputs and datatypes, and exactly one input holds the values."""
        spec = model.spec
        known = [metadata.inputs(spec)[0].name, *metadata.other_inputs(spec), *(STATE + name for name in spec.states)]
        for name, tensor in self._tensors.items():
            if name not in known:
                raise tensor_error(name, f"is not an input of {model.spec.name}: its inputs are {', '.join(known)}")
            accepted = VALUE_INPUTS.get("inputs" if name.startswith(STATE) else name, INTEGERS)
            if tensor.datatype not in accepted:
                raise tensor_error(name, f"is {tensor.datatype}: send it as {' or '.join(accepted)}")
        choices = [name for name in known if name not in (LENGTHS, OFFSETS) and not name.startswith(STATE)]
        present = [name for name in choices if name in self._tensors]
        if not present:
            raise tensor_error(choices[0], f"is missing: {model.spec.name} requires {' or '.join(choices)}")
        if len(present) > 1:
            raise tensor_error(present[1], f"and {present[0]} cannot be combined: send only one of them")

    def _tokenize(self, text: Tensor, model: ServedModel, settings: Settings) -> PackedInputs:
        assert isinstance(text.values, list)
        if text.shape not in ((len(text.values),), (len(text.values), 1)):
            raise tensor_error(text.name, f"has the shape {list(text.shape)}: send the shape [sequences] or [sequences, 1]")
        validation.check_input_count(len(text.values), settings, text.name)
        sequences: list[bytes] = []
        for index, element in enumerate(text.values):
            field = f"{text.name}[{index}]"
            sequences.append(validation.tokenize(_decode_utf8(element, field), field, model))
            validation.check_steps(len(sequences[-1]) // ID_BYTES, field, model)
        return PackedInputs([len(ids) // ID_BYTES for ids in sequences], b"".join(sequences))


def values_name(names: Container[str]) -> str:
    """Return the name of the input that holds the values. names: of all inputs."""
    return next((name for name in VALUE_INPUTS if name in names), "inputs")


def _with_states(packed: PackedInputs, tensors: Mapping[str, Tensor], model: ServedModel) -> PackedInputs:
    """Add the states from which the sequences start; raises InvalidInput for a tensor without a line for each sequence."""
    count = len(packed.lengths)
    states: list[dict[str, Array]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        assert not isinstance(tensor.values, list)
        if tensor.values.ndim != 2 or len(tensor.values) != count:
            raise tensor_error(name, f"has the shape {list(tensor.shape)}: send one line for each of the {count} sequences")
        for state, line in zip(states, tensor.values, strict=True):
            state[name.removeprefix(STATE)] = line
    return validation.with_states(packed, states, "states", model)


def _with_sequence_dimension(values: Tensor, model: ServedModel) -> Array:
    """Return the values as (sequences, steps) or (sequences, steps, features)."""
    assert not isinstance(values.values, list)
    features = model.spec.input.features
    step = () if features is None else (features,)
    array = values.values[None] if len(values.shape) == 1 + len(step) else values.values
    if array.ndim != 2 + len(step) or array.shape[2:] != step:
        shapes = [f"[{', '.join((*leading, *map(str, step)))}]" for leading in (("steps",), ("sequences", "steps"))]
        raise tensor_error(values.name, f"has the shape {list(values.shape)}: {model.spec.name} takes {' or '.join(shapes)}")
    return array


def _remove_padding(sequences: Array, lengths: Tensor | None) -> tuple[Array, list[int]]:
    """Return the time steps of all sequences without padding, and the length of each sequence."""
    count, longest = sequences.shape[:2]
    if lengths is None:
        return sequences.reshape(-1, *sequences.shape[2:]), [longest] * count
    if lengths.shape not in ((count,), (count, 1)):
        problem = f"has the shape {list(lengths.shape)}, but the number of sequences is {count}"
        raise tensor_error(LENGTHS, f"{problem}: send the shape [{count}] or [{count}, 1]")
    steps = _flat_integers(lengths)
    for index in np.flatnonzero((steps < 0) | (steps > longest))[:1]:
        field = f"{LENGTHS}[{index}]"
        problem = f"{field} is {steps[index]}, but each sequence is padded to {longest} steps"
        raise InvalidInput(f"{problem}: send a length between 0 and {longest}", field=field)
    return sequences[np.arange(longest) < steps[:, None]], steps.tolist()


def _split_packed(values: Tensor, sequences: Array, offsets: Tensor) -> tuple[Array, list[int]]:
    """Return the time steps of all sequences, which are packed end to end already, and the length of each sequence."""
    if len(sequences) > 1:
        problem = f"has {len(sequences)} sequences, but with offsets all sequences are packed into one"
        raise tensor_error(values.name, f"{problem}: send the shape [1, steps, ...], or lengths instead of offsets")
    if len(offsets.shape) > 2 or offsets.shape[:-1] not in ((), (1,)) or offsets.shape[-1] < 2:
        raise tensor_error(
            OFFSETS, f"has the shape {list(offsets.shape)}: send the shape [sequences + 1] or [1, sequences + 1]"
        )
    bounds, steps = _flat_integers(offsets), sequences.shape[1]
    if bounds[0] != 0 or bounds[-1] != steps:
        problem = f"run from {bounds[0]} to {bounds[-1]}, but {values.name} has {steps} steps"
        raise tensor_error(OFFSETS, f"{problem}: start at 0 and end at {steps}")
    for index in np.flatnonzero(bounds[1:] < bounds[:-1])[:1]:
        field = f"{OFFSETS}[{index + 1}]"
        problem = f"{field} is {bounds[index + 1]}, but its sequence starts at {bounds[index]}"
        raise InvalidInput(f"{problem}: send offsets that never fall", field=field)
    return sequences[0], np.diff(bounds).tolist()


def _flat_integers(tensor: Tensor) -> Array:
    assert not isinstance(tensor.values, list)
    return tensor.values.reshape(-1)


def _step_names(name: str, lengths: list[int]) -> Callable[[int], str]:
    """Return a function that names a time step of the packed sequences by its sequence and its position in it."""

    def step_name(step: int) -> str:
        starts = [0, *accumulate(lengths)]
        index = bisect_right(starts, step) - 1
        return f"{name}[{index}][{step - starts[index]}]"

    return step_name


def _decode_utf8(element: bytes, field: str) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{field} is not UTF-8 at byte {error.start}: send text encoded as UTF-8", field=field) from None
