"""Workloads of the convolutions on each kind of device, and a product for the comparison of rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from kernels.bench.workload import DENSE_WIDTHS, EMBEDDED, FOLDED, Workload

STEPS, TEMPORAL_STEPS = 64, 256
EMBEDDING = 300
"""Width of the embedding, as in word2vec, and number of maps: a hundred of each filter width, as in Kim 2014."""

IDS_FORMS = (EMBEDDED, FOLDED)

PRODUCT = {
    "cpu": Workload("conv", 1, 1024, 1024, 1024, kind="product"),
    "cuda": Workload("conv", 1, 8192, 8192, 8192, dtype="float16", kind="product"),
}
"""A square product. Its rows are the steps."""


def text_cnn(rows: int, steps: int = STEPS, inputs: int = EMBEDDING, hidden: int = EMBEDDING, **others: Any) -> Workload:
    return Workload("conv", rows, steps, inputs, hidden, kind="text-cnn", **others)


def text_cnn_ids(rows: int, form: str, **others: Any) -> Workload:
    return Workload("conv", rows, STEPS, EMBEDDING, EMBEDDING, kind="text-cnn-ids", form=form, **others)


def embedded(workload: Workload) -> Workload:
    """Return the workload over an embedding. The library runs it for both forms."""
    return replace(workload, form=EMBEDDED)


def dense(rows: int, hidden: int, form: str, **others: Any) -> Workload:
    return Workload("conv", rows, STEPS, hidden, hidden, kind="dense-conv", form=form, **others)


def temporal(rows: int, hidden: int, kind: str = "tcn", **others: Any) -> Workload:
    return Workload("conv", rows, TEMPORAL_STEPS, hidden, hidden, kind=kind, **others)


LARGE = text_cnn(256, 128, 512, 3 * 512, dtype="float16")
"""A text CNN with products that keep a GPU busy."""


def on_cpu(quick: bool) -> Iterator[Workload]:
    yield PRODUCT["cpu"]
    for rows, lengths in product((1, 32) if quick else (1, 8, 32), ("equal", "questions")):
        yield text_cnn(rows, lengths=lengths)
    for hidden, rows, form in product((128,) if quick else (128, 256, 512), (1, 32), DENSE_WIDTHS):
        yield dense(rows, hidden, form)
    if not quick:
        yield from (dense(32, 256, form, lengths="questions") for form in DENSE_WIDTHS)
    for rows, lengths, form in product((1,) if quick else (1, 8, 32), ("equal", "questions"), IDS_FORMS):
        yield text_cnn_ids(rows, form, lengths=lengths)
    yield from (temporal(1, hidden) for hidden in ((64,) if quick else (64, 256)))
    yield temporal(1, 64, kind="tcn-last")


def on_cuda(quick: bool) -> Iterator[Workload]:
    yield PRODUCT["cuda"]
    if quick:
        yield from (text_cnn(rows, dtype="float16") for rows in (1, 32))
        yield from (dense(rows, 256, "width 5", dtype="float16") for rows in (1, 32))
        yield from (text_cnn_ids(1, form, dtype="float16") for form in IDS_FORMS)
        yield temporal(1, 256, dtype="float16")
        return
    yield from (text_cnn(rows, dtype="float16") for rows in (1, 8, 32, 64, 256, 1024))
    yield LARGE
    for hidden, rows, form in product((256, 512), (1, 32), DENSE_WIDTHS):
        yield dense(rows, hidden, form, dtype="float16")
    yield from (text_cnn(rows, dtype="float16", lengths="questions") for rows in (1, 32, 256))
    for rows, form in product((1, 32, 256, 1024), IDS_FORMS):
        yield text_cnn_ids(rows, form, dtype="float16")
    for rows, form in product((1, 32, 256), IDS_FORMS):
        yield text_cnn_ids(rows, form, dtype="float16", lengths="questions")
    for kind, rows in product(("tcn", "tcn-last"), (1, 32)):
        yield temporal(rows, 256, kind, dtype="float16")
    yield from (text_cnn(32), dense(32, 512, "width 5"))
