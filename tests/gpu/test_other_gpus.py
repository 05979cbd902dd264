"""Tests of what other GPUs run. This GPU runs it in their place: the driver compiles the code for compute capability 8.0.

The launchers see the multiprocessors and the shared memory of an NVIDIA L4, or fewer features of this GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, product

import pytest
import torch

from kernels import compile as compiler
from kernels.compile import resident_clusters
from kernels.persistent import cluster, grid
from tests.gpu.cases import GRU, LSTM, SCANS
from tests.gpu.comparisons import agree
from tests.gpu.inputs import BFLOAT16, HALF, RAGGED, TOLERANCE, made
from tests.gpu.stacks import text
from tests.kernels.devices import L4, clear_launch_caches, fresh_shape_caches
from tests.kernels.families import Form

pytestmark = pytest.mark.usefixtures("poisoned")

MANY = [3, 0, 11, *[5] * 60]
LAYERS = [*SCANS, Form("sru", version=1, skip="columns"), Form("sru", version=2), Form("qrnn", pooling="fo", window=1)]


@pytest.fixture
def l4(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile for the architecture of an A100, which every later GPU runs in its virtual form, and launch as on an L4."""
    monkeypatch.setattr(compiler, "_architecture", lambda _: "compute_80")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: L4.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: L4)
    compiler.load_kernel.cache_clear()
    clear_launch_caches()
    with fresh_shape_caches():
        yield
    clear_launch_caches()
    compiler.load_kernel.cache_clear()


@pytest.mark.usefixtures("l4")
@pytest.mark.parametrize("form", [LSTM, GRU], ids=str)
@pytest.mark.parametrize(
    "hidden, storage", [*zip((100, 256, 512, 768, 900), cycle((HALF, BFLOAT16))), (512, BFLOAT16)], ids=str
)
def test_persistent_kernel_matches_the_reference(form: Form, storage: torch.dtype, hidden: int) -> None:
    for lengths in (RAGGED, MANY):
        arguments = made(form, lengths, hidden, storage=storage)
        agree(form.run(*arguments, backend="persistent"), form.exact(arguments), TOLERANCE[storage])


@pytest.mark.usefixtures("l4")
@pytest.mark.parametrize("form", LAYERS, ids=str)
def test_scans_match_the_reference(form: Form) -> None:
    sizes: Sequence[tuple[list[int], int]] = [*product((RAGGED, MANY), (33, 128)), ([700, 0, 500], 128)]
    for (lengths, hidden), storage in product(sizes, TOLERANCE):
        arguments = made(form, lengths, hidden, storage=storage)
        agree(form.run(*arguments, backend="fused"), form.exact(arguments), TOLERANCE[storage])


@pytest.mark.usefixtures("l4")
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("labels", [0, 6])
def test_text_cnn_over_tables_matches_the_reference(rows: int, labels: int) -> None:
    problem = text("tables", [*range(rows)], 3, labels=labels)
    agree(problem.map_arrays(torch.Tensor.cuda).run(backend="tables"), problem.exact(), TOLERANCE[HALF])


@pytest.mark.parametrize("largest, hidden", [(8, 256), (8, 512), (0, 128)])
def test_smaller_clusters_match_the_reference(largest: int, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters of at most eight blocks, or none at all."""

    def resident(kernel: compiler.Kernel, shared: int) -> int:
        return resident_clusters(kernel, shared) if kernel.cluster <= largest else 0

    monkeypatch.setattr(cluster, "resident_clusters", resident)
    arguments = made(LSTM, [3, 0, 11, 5], hidden)
    with fresh_shape_caches():
        agree(LSTM.run(*arguments, backend="persistent"), LSTM.exact(arguments), TOLERANCE[HALF])


@pytest.mark.parametrize("hidden", [256, 768, 1024])
def test_grid_without_lent_registers_matches_the_reference(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "lends_registers", lambda _: False)
    arguments = made(LSTM, MANY, hidden)
    with fresh_shape_caches():
        agree(LSTM.run(*arguments, backend="grid"), LSTM.exact(arguments), TOLERANCE[HALF])
