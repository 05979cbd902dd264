"""Runs a model on arrays, without a server: every output by name, and states in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.ragged import Ragged
from service.errors import ModelError
from service.modeling.encoder import Encoder
from service.modeling.npz import Array
from service.modeling.spec import ClassifyHead, ModelSpec, NextHead, RegressHead, SpanHead, TagHead
from service.modeling.tokenizer import Tokenizer

INPUTS = {"text": "text", "ids": "ids", "features": "inputs"}
"""The name of a model's input by its kind."""
STATE = "state."
"""Prefix of the names of states."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of a file, packed end to end.

    data: (tokens,) ids or (tokens, features); offsets: (sequences + 1,); padded: the steps of the padded form in which they were given, or
    None; states: initial states by name, (sequences, width) each.
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
        steps = max(self.padded, int(lengths.max(initial=0)))
        padded = np.zeros((len(lengths), steps, *packed.shape[1:]), packed.dtype)
        padded[np.arange(steps) < lengths[:, None]] = packed
        return padded


def run_arrays(encoder: Encoder, arrays: Mapping[str, Array], tokenizer: Tokenizer | None = None) -> dict[str, Array]:
    """Return every output of a model by name.

    arrays: `ids` (sequences, steps) or `inputs` (sequences, steps, features), with `lengths` (sequences,) where they differ, or packed end
    to end with `offsets` (sequences + 1,); or `text` (sequences,). Names that start with `state.` are initial states, as in the result.
    Other names are ignored.

    Returns `logits`, and `scores`, `value`, `probabilities`, `embedding` and `sequence` as far as the head has them, `offsets` of packed
    steps, and the final state of each recurrent layer and direction, such as `state.layers.1.0.forward.hidden` (sequences, width). Values
    by step are in the form of the inputs. Raises ModelError for inputs that the model does not take.
    """
    batch = read_batch(encoder.spec, arrays, tokenizer)
    x = Ragged(torch.from_numpy(batch.data).to(encoder.device), torch.from_numpy(batch.offsets).to(encoder.device))
    initial = {name.removeprefix(STATE): torch.from_numpy(values).to(encoder.device) for name, values in batch.states.items()}
    try:
        encoding, states = encoder.run_with_states(x, initial, sequence=encoder.spec.has_steps)
    except ValueError as error:
        raise ModelError(f"the arrays do not fit {encoder.spec.name}: {error}") from error
    outputs = _head_outputs(encoder, encoding.head_output.embedding, encoding.sequence)
    by_step = {"sequence", "logits", "probabilities"} if encoder.spec.head.kind in ("tag", "span") else {"sequence"}
    changed_steps = not torch.equal(encoding.offsets, x.offsets)
    form = Batch(batch.data, encoding.offsets.cpu().numpy().astype(np.int64), batch.padded, {}) if changed_steps else batch
    result = {name: form.arranged(_array(values)) if name in by_step else _array(values) for name, values in outputs.items()}
    if batch.padded is None or changed_steps:
        result["offsets"] = form.offsets
    return result | {f"{STATE}{name}": _array(values) for name, values in states.items()}


def read_batch(spec: ModelSpec, arrays: Mapping[str, Array], tokenizer: Tokenizer | None = None) -> Batch:
    """Return the sequences of a model's input; raises ModelError for arrays that are missing or do not fit together."""
    name = INPUTS[spec.input.kind]
    if name == "text" and "text" not in arrays:
        name = "ids"
    if name not in arrays:
        raise ModelError(
            f"the arrays {', '.join(sorted(arrays)) or '(none)'} have no {name!r}, which {spec.name} takes: add it"
        )
    values = arrays[name]
    states = {key: np.ascontiguousarray(array, np.float32) for key, array in arrays.items() if key.startswith(STATE)}
    if name == "text":
        if tokenizer is None or values.ndim != 1 or values.dtype.kind != "U":
            raise ModelError("'text' must be one text for each sequence, and the model needs a tokenizer")
        ids = [np.frombuffer(tokenizer.packed_ids(str(text), "text"), "<i4") for text in values]
        return Batch(np.concatenate(ids) if ids else np.empty(0, np.int32), _offsets([len(row) for row in ids]), None, states)
    dims = 1 if spec.input.features is None else 2
    if dims == 2 and values.shape[-1:] != (spec.input.features,):
        raise ModelError(f"{name!r} has the shape {values.shape}, and {spec.name} takes rows of {spec.input.features} numbers")
    data, offsets, padded = _packed(name, values, arrays, dims)
    if dims == 1:
        _check_ids(spec, data)
    return Batch(np.ascontiguousarray(data, np.int32 if dims == 1 else np.float32), offsets, padded, states)


def _packed(name: str, values: Array, arrays: Mapping[str, Array], dims: int) -> tuple[Array, Array, int | None]:
    """Return the packed values, their offsets, and the steps of the padded form or None. dims: dimensions of packed values."""
    if "offsets" in arrays:
        offsets = arrays["offsets"].astype(np.int64)
        if (
            values.ndim != dims
            or offsets.ndim != 1
            or offsets[:1].tolist() != [0]
            or offsets[-1] != len(values)
            or (np.diff(offsets) < 0).any()
        ):
            raise ModelError(f"'offsets' must rise from 0 to the {len(values)} steps of {name!r}, packed end to end")
        return values, offsets, None
    if values.ndim != dims + 1:
        raise ModelError(f"{name!r} has {values.ndim} dimensions: send (sequences, steps, ...) or packed steps with 'offsets'")
    sequences, steps = values.shape[:2]
    lengths = arrays.get("lengths", np.full(sequences, steps)).astype(np.int64)
    if lengths.shape != (sequences,) or (lengths < 0).any() or (lengths > steps).any():
        raise ModelError(f"'lengths' must be {sequences} numbers from 0 to {steps}, one for each sequence of {name!r}")
    return values[np.arange(steps) < lengths[:, None]], _offsets(lengths), steps


def _offsets(lengths: Sequence[int] | Array) -> Array:
    return np.concatenate(([0], np.cumsum(np.asarray(lengths, np.int64))))


def _check_ids(spec: ModelSpec, ids: Array) -> None:
    vocabulary = spec.input.vocabulary or 0
    if ids.dtype.kind not in "iu":
        raise ModelError(f"'ids' has the dtype {ids.dtype}: send integers")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ModelError(
            f"'ids' has ids from {ids.min()} to {ids.max()}, and the vocabulary of {spec.name} ends at {vocabulary - 1}"
        )


def _head_outputs(encoder: Encoder, embedding: Tensor | None, sequence: Tensor | None) -> dict[str, Tensor]:
    """Return what the head computes, by name."""
    head = encoder.spec.head
    outputs = {name: values for name, values in (("embedding", embedding), ("sequence", sequence)) if values is not None}
    vectors = sequence if isinstance(head, TagHead | SpanHead) else embedding
    logits = None if vectors is None else encoder.logits(vectors)
    if logits is None:
        return outputs
    outputs["logits"] = logits
    if isinstance(head, RegressHead):
        outputs["value"] = encoder.scores(logits)
    elif isinstance(head, ClassifyHead):
        outputs["scores"] = encoder.scores(logits)
    elif isinstance(head, TagHead | NextHead):
        outputs["probabilities"] = logits.softmax(dim=1)
    return outputs


def _array(values: Tensor) -> Array:
    array: Array = values.float().cpu().numpy()
    return array
