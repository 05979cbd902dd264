"""Runs a model on arrays, without a server: every output by name, and states in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.ragged import Ragged
from service.errors import ModelError
from service.modeling.encoder import Encoder, Encoding
from service.modeling.npz import Array
from service.modeling.spec import ModelSpec
from service.modeling.tokenizer import Tokenizer

INPUTS = {"text": "text", "ids": "ids", "features": "inputs"}
"""The name of a model's input by its kind."""
SEQUENCES = ("ids", "inputs", "text", "lengths", "offsets")
"""The names of the arrays that hold the sequences."""
STATE, FINAL = "state.", "final."
"""Prefixes of the names of states: initial states in a file of inputs, final states among expected outputs."""
MAIN = "output"
"""The name of the main output of the head among expected outputs."""


@dataclass(frozen=True, slots=True)
class ArrayBatch:
    """The sequences of a file, packed end to end.

    data: (tokens,) ids or (tokens, features); offsets: (sequences + 1,); padded: the number of steps in the padded form, or
    None for the packed form; states: initial states by name, (sequences, width) each.
    """

    data: Array
    offsets: Array
    padded: int | None
    states: dict[str, Array]

    def arranged(self, packed: Array) -> Array:
        """Return values by step, (tokens, ...), in the form of the inputs. Padded values are (sequences, steps, ...)."""
        if self.padded is None:
            return packed
        lengths = np.diff(self.offsets)
        padded = np.zeros((len(lengths), self.padded, *packed.shape[1:]), packed.dtype)
        padded[np.arange(self.padded) < lengths[:, None]] = packed
        return padded

    def with_offsets(self, offsets: Array) -> ArrayBatch:
        """Return the form of outputs with other numbers of steps. Padded outputs have the length of the longest."""
        return replace(self, offsets=offsets, padded=None if self.padded is None else int(np.diff(offsets).max(initial=0)))


def run_arrays(encoder: Encoder, arrays: Mapping[str, Array], tokenizer: Tokenizer | None = None) -> dict[str, Array]:
    """Return every output of a model by name.

    arrays: `ids` (sequences, steps) or `inputs` (sequences, steps, features), with `lengths` (sequences,) where they differ, or packed end
    to end with `offsets` (sequences + 1,); or `text` (sequences,). Names that start with `state.` are initial states, as in the result.
    Other arrays are not read.

    Returns `logits`, and `scores`, `value`, `probabilities`, `embedding` and `sequence` as far as the head has them, `offsets`
    if the steps are packed or a layer changed their number, and the final state of each recurrent layer and direction, such as
    `state.layers.1.0.forward.hidden` (sequences, width). Values by step are in the form of the inputs.
    Raises ModelError for inputs that the model does not take.
    """
    batch = read_batch(encoder.spec, arrays, tokenizer)
    x = Ragged(torch.from_numpy(batch.data).to(encoder.device), torch.from_numpy(batch.offsets).to(encoder.device))
    initial = {name.removeprefix(STATE): torch.from_numpy(values).to(encoder.device) for name, values in batch.states.items()}
    try:
        encoding, states = encoder.run_with_states(x, initial, sequence=encoder.spec.has_steps)
    except ValueError as error:
        raise ModelError(f"the arrays do not fit {encoder.spec.name}: {error}") from error
    encoding = _without_padding_alone(encoding, x)
    outputs = _head_outputs(encoder, _embedding(encoder, encoding, x), encoding.sequence)
    by_step = {"sequence"} if encoder.spec.pools else {"sequence", "logits", encoder.spec.head.main_output}
    changed_steps = not torch.equal(encoding.offsets, x.offsets)
    form = batch.with_offsets(encoding.offsets.cpu().numpy().astype(np.int64)) if changed_steps else batch
    result = {name: form.arranged(_array(values)) if name in by_step else _array(values) for name, values in outputs.items()}
    if batch.padded is None or changed_steps:
        result["offsets"] = form.offsets
    return result | {f"{STATE}{name}": _array(values) for name, values in states.items()}


def check_names(spec: ModelSpec, arrays: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
    """Raise ModelError for an array that is no input and no expected output: a misspelled name would change the result silently."""
    known = {*SEQUENCES, MAIN, *outputs}
    wrong = [name for name in arrays if name not in known and not name.startswith((STATE, FINAL))]
    if wrong:
        raise ModelError(
            f"{wrong[0]!r} is neither an input nor an output of {spec.name}: the inputs are {', '.join(SEQUENCES)} and states, "
            f"the outputs {', '.join(outputs)}"
        )


def read_batch(spec: ModelSpec, arrays: Mapping[str, Array], tokenizer: Tokenizer | None = None) -> ArrayBatch:
    """Return the sequences of a model's input; raises ModelError for arrays that are missing or do not fit together."""
    name = _input_name(spec, arrays)
    states = {key: _floats(key, array) for key, array in arrays.items() if key.startswith(STATE)}
    if name == "text":
        data, offsets, padded = _tokenized(arrays, tokenizer)
    else:
        data, offsets, padded = _packed(name, arrays, 1 if spec.input.features is None else 2)
    _check_steps(spec, np.diff(offsets))
    if name == "inputs":
        if data.shape[1] != spec.input.features:
            raise ModelError(f"'inputs' has steps of {data.shape[1]} numbers, and {spec.name} takes {spec.input.features}")
        return ArrayBatch(_floats(name, data), offsets, padded, states)
    _check_ids(spec, name, data)
    return ArrayBatch(np.ascontiguousarray(data, np.int32), offsets, padded, states)


def _input_name(spec: ModelSpec, arrays: Mapping[str, Array]) -> str:
    """Return the name of the array that has the sequences. A model of texts takes token ids as well."""
    names = [INPUTS[spec.input.kind]] + (["ids"] if spec.input.kind == "text" else [])
    given = [name for name in names if name in arrays]
    if not given:
        raise ModelError(
            f"the arrays {', '.join(sorted(arrays)) or '(none)'} have no {names[0]!r}, which {spec.name} takes: add it"
        )
    if len(given) > 1 or {"lengths", "offsets"} <= arrays.keys():
        both = given if len(given) > 1 else ["lengths", "offsets"]
        raise ModelError(f"the arrays have both {both[0]!r} and {both[1]!r}: remove one of them")
    return given[0]


def _tokenized(arrays: Mapping[str, Array], tokenizer: Tokenizer | None) -> tuple[Array, Array, None]:
    """Return the token ids of texts, packed end to end, and their offsets."""
    values = arrays["text"]
    if tokenizer is None or values.ndim != 1 or values.dtype.kind != "U":
        raise ModelError("'text' must be one text for each sequence, and the model needs a tokenizer")
    for name in ("lengths", "offsets"):
        if name in arrays:
            raise ModelError(f"'text' has whole texts, which have no {name!r}: remove it")
    ids = [np.frombuffer(tokenizer.packed_ids(str(text), "text"), "<i4") for text in values]
    return np.concatenate([np.empty(0, np.int32), *ids]), _offsets([len(row) for row in ids]), None


def _packed(name: str, arrays: Mapping[str, Array], dims: int) -> tuple[Array, Array, int | None]:
    """Return the packed values, their offsets, and the steps of the padded form or None. dims: dimensions of packed values."""
    values = arrays[name]
    if "offsets" in arrays:
        offsets = _integers("offsets", arrays["offsets"])
        if values.ndim != dims:
            raise ModelError(f"{name!r} has the shape {values.shape}: with 'offsets', send (steps{', features' * (dims - 1)})")
        ends = offsets.reshape(-1)[[0, -1]].tolist() if offsets.size else []
        if offsets.ndim != 1 or ends != [0, len(values)] or (np.diff(offsets) < 0).any():
            raise ModelError(f"'offsets' must rise from 0 to the {len(values)} steps of {name!r}, packed end to end")
        return values, offsets, None
    if values.ndim != dims + 1:
        raise ModelError(
            f"{name!r} has the shape {values.shape}: send (sequences, steps{', features' * (dims - 1)}), or packed steps with 'offsets'"
        )
    sequences, steps = values.shape[:2]
    lengths = _integers("lengths", arrays["lengths"]) if "lengths" in arrays else np.full(sequences, steps)
    if lengths.shape != (sequences,) or (lengths < 0).any() or (lengths > steps).any():
        raise ModelError(f"'lengths' must be {sequences} numbers from 0 to {steps}, one for each sequence of {name!r}")
    return values[np.arange(steps) < lengths[:, None]], _offsets(lengths), steps


def _integers(name: str, array: Array) -> Array:
    if array.dtype.kind not in "iu":
        raise ModelError(f"{name!r} has the dtype {array.dtype}: send integers")
    return array.astype(np.int64)


def _floats(name: str, array: Array) -> Array:
    """Return numbers as float32; raises ModelError for text, and for numbers that float32 does not have."""
    if array.dtype.kind not in "biuf":
        raise ModelError(f"{name!r} has the dtype {array.dtype}: send numbers")
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(floats).all():
        raise ModelError(f"{name!r} has numbers that are not finite in float32: remove them")
    return floats


def _check_steps(spec: ModelSpec, lengths: Array) -> None:
    least = 0 if spec.takes_empty else spec.min_steps
    short = np.flatnonzero(lengths < least)
    if len(short):
        raise ModelError(
            f"the sequence {short[0]} has {lengths[short[0]]} steps, and {spec.name} needs at least {least}: send longer sequences"
        )


def _offsets(lengths: Sequence[int] | Array) -> Array:
    return np.concatenate(([0], np.cumsum(np.asarray(lengths, np.int64))))


def _check_ids(spec: ModelSpec, name: str, ids: Array) -> None:
    vocabulary = spec.input.vocabulary or 0
    if ids.dtype.kind not in "iu":
        raise ModelError(f"{name!r} has the dtype {ids.dtype}: send integers")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ModelError(
            f"{name!r} has ids from {ids.min()} to {ids.max()}, and the vocabulary of {spec.name} ends at {vocabulary - 1}"
        )


def _without_padding_alone(encoding: Encoding, x: Ragged) -> Encoding:
    """Return an encoding in which a sequence without steps has none, also where a convolution pads it enough for a window."""
    counts, has_steps = torch.diff(encoding.offsets), torch.diff(x.offsets) > 0
    if encoding.sequence is None or not (counts[~has_steps] > 0).any():
        return encoding
    offsets = torch.nn.functional.pad((counts * has_steps).cumsum(0), (1, 0)).to(encoding.offsets.dtype)
    return replace(encoding, sequence=encoding.sequence[has_steps.repeat_interleave(counts)], offsets=offsets)


def _embedding(encoder: Encoder, encoding: Encoding, x: Ragged) -> Tensor | None:
    """Return the vectors on which the head works. Sequences without steps have the vector of zero pools for all states."""
    vectors, without_steps = encoding.head_output.embedding, encoder.run_without_steps()
    if vectors is None or without_steps is None:
        return vectors
    assert without_steps.head_output.embedding is not None, "the head has a vector for every sequence"
    return torch.where((torch.diff(x.offsets) == 0)[:, None], without_steps.head_output.embedding, vectors)


def _head_outputs(encoder: Encoder, embedding: Tensor | None, sequence: Tensor | None) -> dict[str, Tensor]:
    """Return the outputs of the head by name."""
    spec = encoder.spec
    outputs = {name: values for name, values in (("embedding", embedding), ("sequence", sequence)) if values is not None}
    vectors = embedding if spec.pools else sequence
    logits = None if vectors is None else encoder.logits(vectors)
    if logits is not None:
        outputs["logits"] = logits
        if spec.head.main_output is not None:
            outputs[spec.head.main_output] = encoder.scores(logits)
    return outputs


def _array(values: Tensor) -> Array:
    array: Array = values.float().cpu().numpy()
    return array
