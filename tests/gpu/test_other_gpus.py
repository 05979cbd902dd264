"""Tests of what GPUs before Hopper run. This GPU runs it in their place: the driver compiles the code for compute capability 8.0.

The launchers see the multiprocessors and the shared memory of an NVIDIA L4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch

from kernels import compile as compiler
from kernels.backend import explain
from tests.gpu.inputs import TOLERANCE, agree, close, made
from tests.kernels.devices import L4, clear_launch_caches
from tests.kernels.families import Form
from tests.kernels.shapes import fresh_shape_caches
from tests.kernels.stacks import Maker
from tests.kernels.usual_layers import SCANS

pytestmark = pytest.mark.usefixtures("poisoned")

RAGGED = [9, 0, 3, 17, 1, 5, 12, 12, 2, 30, 0]
MANY = [3, 0, 11, *[5] * 60]
OF_IDS = [Form("sru", version=1, skip="none", ids=True), Form("qrnn", pooling="ifo", window=2, ids=True)]


@pytest.fixture(autouse=True)
def _l4(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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


@pytest.mark.parametrize("form", [Form("lstm"), Form("gru", reset="after")], ids=str)
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [100, 256, 512, 768, 900])
def test_persistent_kernel_matches_the_reference(form: Form, storage: torch.dtype, hidden: int) -> None:
    for lengths in (RAGGED, MANY):
        arguments = made(form, lengths, hidden, storage=storage)
        agree(form.run(*arguments, backend="persistent"), form.exact(arguments), TOLERANCE[storage])


@pytest.mark.parametrize("form", [*SCANS, *OF_IDS], ids=str)
@pytest.mark.parametrize("lengths", [RAGGED, MANY, [700, 0, 500]], ids=["few", "many", "long"])
def test_scans_match_the_reference(form: Form, lengths: Sequence[int]) -> None:
    for storage, hidden in product(TOLERANCE, (33, 128)):
        arguments = made(form, lengths, hidden, storage=storage)
        agree(form.run(*arguments, backend="fused"), form.exact(arguments), TOLERANCE[storage])


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("labels", [0, 6])
def test_text_cnn_over_tables_matches_the_reference(rows: int, labels: int) -> None:
    cnn = Maker(24).text_cnn([*range(rows)], (3, 4, 5), (100, 100, 64), ids="tables", labels=labels)
    halves = cnn.map_arrays(lambda array: (array.half() if array.is_floating_point() else array).cuda())
    encoded, expected = halves.run(backend="tables"), halves.exact()
    for name in ("max", "scores") if labels else ("max",):
        close(getattr(encoded, name), getattr(expected, name), TOLERANCE[torch.float16], name)


def test_explain_names_the_kernels_of_an_l4() -> None:
    assert (
        explain("lstm", device="cuda:0", dtype="float16", hidden=768)
        .splitlines()[-1]
        .startswith("persistent: chosen (the grid")
    )
    assert explain("sru", device="cuda:0", dtype="float16", hidden=768) == "fused: chosen (after a library product)"
    refused = "persistent: this device has no room for 1024 hidden units, at most for 928"
    assert refused in explain("lstm", device="cuda:0", dtype="float16", hidden=1024).splitlines()
