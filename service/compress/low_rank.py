"""An embedding of a lower rank, for models over tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from service.errors import ModelError
from service.modeling.spec import MATRICES, EmbeddingLayer, ModelSpec

Arrays = Mapping[str, Tensor]


def reduce_embedding(model: ModelSpec, arrays: Arrays, rank: int) -> tuple[ModelSpec, dict[str, Tensor], float]:
    """Return a model whose embedding has `rank` columns, its arrays, and the share of the squared product that it keeps.

    The product of the embedding E, (vocabulary, width), with all matrices M of the layer after it, side by side, is replaced by its best
    approximation of this rank (Eckart and Young 1936): by the truncated singular value decomposition E M = U S V, whose factors U S^½ and
    S^½ V are the new embedding and the new matrices. Raises ModelError for a layer that uses its inputs in another way than in products.
    """
    embedding = model.layers[0]
    if not isinstance(embedding, EmbeddingLayer):
        raise ModelError(f"--rank needs a model over tokens, and {model.name} takes features: leave --rank out")
    if rank >= embedding.width:
        raise ModelError(f"--rank is {rank} and the embedding has {embedding.width} columns: choose a lower rank")
    reduced = _with_width(model, embedding, rank)
    axes = _input_axes(model, reduced)
    flat = {name: arrays[name].double().movedim(axis, 0).flatten(1) for name, axis in axes.items()}
    left, right, kept = _factors(arrays["layers.0.weight"].double(), torch.cat(list(flat.values()), dim=1), rank)
    changed = {"layers.0.weight": left}
    for name, part in zip(axes, torch.split(right, [one.shape[1] for one in flat.values()], dim=1), strict=True):
        moved = arrays[name].movedim(axes[name], 0)
        changed[name] = part.reshape(rank, *moved.shape[1:]).movedim(0, axes[name])
    return reduced, {name: changed.get(name, array).to(array.dtype).contiguous() for name, array in arrays.items()}, kept


def _with_width(model: ModelSpec, embedding: EmbeddingLayer, width: int) -> ModelSpec:
    layers = (embedding.model_copy(update={"width": width}), *model.layers[1:])
    return model.model_copy(update={"layers": layers})


def _input_axes(model: ModelSpec, reduced: ModelSpec) -> dict[str, int]:
    """Return the matrices of the layer after the embedding, and the axis of each along which its inputs are."""
    refusal = ModelError(
        f"--rank cannot be used for {model.name}: the layer after its embedding uses its inputs in other ways than a product with "
        "a matrix, or would lose its projection"
    )
    before, after = model.tensors(), reduced.tensors()
    if before.keys() != after.keys():
        raise refusal
    axes: dict[str, int] = {}
    for name in before.keys() - {"layers.0.weight"}:
        differing = [axis for axis, sizes in enumerate(zip(before[name], after[name], strict=True)) if sizes[0] != sizes[1]]
        if differing and (len(differing) > 1 or not name.startswith("layers.1.") or name.rpartition(".")[2] not in MATRICES):
            raise refusal
        if differing:
            axes[name] = differing[0]
    if not axes:
        raise refusal
    return dict(sorted(axes.items()))


def _factors(embedding: Tensor, matrices: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Return the factors of the best approximation of `embedding @ matrices`, and the share of its squares that they keep.

    The decomposition of a small core between two QR decompositions is exact: the product itself may have millions of numbers.
    """
    rows, upper = torch.linalg.qr(embedding)
    columns, lower = torch.linalg.qr(matrices.T)
    left, values, right = torch.linalg.svd(upper @ lower.T, full_matrices=False)
    root = values[:rank].sqrt()
    kept = values[:rank].square().sum() / values.square().sum().clamp(min=torch.finfo(values.dtype).tiny)
    first, second = rows @ left[:, :rank] * root, root[:, None] * (right[:rank] @ columns.T)
    missing = rank - first.shape[1]  # the product may have a lower rank than requested
    if missing > 0:
        first = torch.nn.functional.pad(first, (0, missing))
        second = torch.nn.functional.pad(second, (0, 0, 0, missing))
    return first, second, kept.item()
