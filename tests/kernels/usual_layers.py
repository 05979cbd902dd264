"""Layers of usual sizes, and their launches on an emulated device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kernels import conv
from kernels.backend import AUTO, Choice, Problem, choose
from kernels.conv.backend import ConvBackend
from kernels.conv.tables import TABLES
from kernels.persistent.choice import FindShape, adaptive_shape, launch_plan
from kernels.persistent.packing import Variant
from kernels.ragged import Outputs
from tests.kernels.devices import FakeKernel, FakeLaunch
from tests.kernels.families import Form
from tests.kernels.stacks import Maker

CUDA = torch.device("cuda:0")
HALVES = (torch.float16, torch.bfloat16)
INPUTS = 16
STEPS, LAST = Outputs(steps=True), Outputs(last=True)
SCANS = (
    Form("sru", version=1),
    Form("sru", version=2),
    Form("sru", version=1, skip="columns"),
    Form("qrnn", pooling="fo", window=1),
    Form("qrnn", pooling="ifo", window=2),
)


class RowsLaunch(NamedTuple):
    """A launch of the rows from `first` up to `until`."""

    first: int
    until: int
    launch: FakeLaunch


def chosen(family: str, storage: torch.dtype, hidden: int, variants: tuple[str, ...] = (), *, requested: str = AUTO) -> Choice:
    return choose(Form(family).backends, Problem(CUDA, storage, hidden, variants), requested)


def persistent_launches(
    variant: Variant, rows: int, directions: int, find_shape: FindShape = adaptive_shape, steps: int = 64
) -> list[RowsLaunch]:
    """Return the launches of an LSTM or a GRU in the order in which they run."""
    plan = launch_plan("lstm", find_shape, variant, directions, rows, steps)
    launches = []
    for sides, first, until, launch in plan.launches:
        kernel: Any = launch.kernel
        launches.append(RowsLaunch(first, until, FakeLaunch(kernel, (launch.blocks * len(sides), 1, 1), launch.shared)))
    return launches


def scan_launch(
    made: list[FakeKernel], form: Form, storage: torch.dtype, hidden: int, lengths: Sequence[int], want: Outputs
) -> FakeLaunch:
    """Return the launch of an SRU or a QRNN, without the launch of fold.cu. made: the kernels of the emulated device."""
    launched = {id(kernel): len(kernel.launches) for kernel in made}
    arguments = form.arguments(lengths, hidden, INPUTS, storage=storage)
    chosen(form.family, storage, hidden).backend.run(*arguments, want=want)
    kernels = [kernel for kernel in made if kernel.source.name != "fold.cu"]
    [launch] = [new for kernel in kernels for new in kernel.launches[launched.get(id(kernel), 0) :]]
    return launch


def text_cnn_launches(
    made: list[FakeKernel], storage: torch.dtype, outputs: int, lengths: Sequence[int], labels: int
) -> list[FakeLaunch]:
    """Return the launches of a text CNN over folded tables."""
    widths = (3, 4, 5)
    cnn = Maker(INPUTS).text_cnn(lengths, widths, [outputs] * len(widths), ids="tables", labels=labels)
    cnn = cnn.map_arrays(lambda array: array.to(storage) if array.is_floating_point() else array)
    backend = chosen("conv", storage, outputs, (TABLES,)).backend
    assert isinstance(backend, ConvBackend) and backend in conv.BACKENDS
    before = sum(len(kernel.launches) for kernel in made)
    backend.run_text_cnn(*cnn)
    return [launch for kernel in made for launch in kernel.launches][before:]
