"""The bench agrees first, then times; who is wrong or missing is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.bench import timing
from kernels.bench.agreement import Expected, tolerance
from kernels.bench.baselines import PEERS
from kernels.bench.baselines.baseline import Call, MissingError, Peer, wanted
from kernels.bench.baselines.discrete import lstm_gates
from kernels.bench.baselines.onnx_runtime import onnx_runtime
from kernels.bench.baselines.sru_package import sru_package
from kernels.bench.given import Given, made_up
from kernels.bench.workload import Workload
from tests.kernels.bench.conftest import CPU, FORMED, RECURRENCE, TINY, measured, tiny

OPTIONAL = {"onnxruntime", "sru package", "direct loops"}


def always(answer: Tensor) -> Peer:
    return Peer("stubborn", lambda _: Call(lambda: answer))


def breaking(given: Given) -> Call:
    raise RuntimeError("no such instruction")


def absent(given: Given) -> Call:
    wanted("a_package_that_nobody_has", "install a_package")
    raise AssertionError("it was found")


@pytest.mark.parametrize("workload", TINY, ids=str)
def test_every_backend_and_torch_peer_agrees_and_is_timed(workload: Workload) -> None:
    peers = [peer for peer in PEERS[workload.family] if peer.name not in OPTIONAL and peer.is_asked(workload, "cpu")]
    findings = measured(workload, *peers)
    assert not findings.wrong and not findings.left_out
    assert [row.backend for row in findings.rows] == ["framework", *(peer.name for peer in peers)]
    for row in findings.rows:
        assert row.timing == "eager"
        assert 0 <= row.agrees < 1e-5
        assert 0 < row.spread.p10_us <= row.spread.median_us <= row.spread.p90_us < 1e6
        assert row.spread.repetitions >= timing.AT_LEAST


@pytest.mark.parametrize("workload", FORMED, ids=str)
def test_every_form_agrees_over_data_and_token_ids(workload: Workload) -> None:
    findings = measured(workload)
    assert not findings.wrong
    (row,) = findings.rows
    assert row.backend == "framework" and row.agrees < 1e-5


@pytest.mark.parametrize("workload", [one for one in TINY if one.family in ("lstm", "gru")], ids=str)
def test_onnx_runtime_agrees_where_it_is_installed(workload: Workload) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    findings = measured(workload, Peer("onnxruntime", onnx_runtime))
    assert not findings.wrong
    assert findings.rows[-1].backend == "onnxruntime"


@pytest.mark.parametrize(
    "answer, says",
    [
        (torch.zeros(3, 6), "the answer is off by"),
        (torch.full((3, 6), torch.nan), "the answer is not finite"),
        (torch.zeros(3, 5), r"the answer has the shape (3, 5), expected (3, 6)"),
    ],
    ids=["wrong", "not a number", "of another shape"],
)
def test_a_peer_that_disagrees_is_named_and_not_timed(answer: Tensor, says: str) -> None:
    findings = measured(tiny("lstm"), always(answer))
    assert [row.backend for row in findings.rows] == ["framework"]
    (line,) = findings.wrong
    assert line.startswith(f"stubborn on {tiny('lstm')}: {says}")


def test_a_peer_that_mixes_up_two_rows_disagrees() -> None:
    def mixed_up(given: Given) -> Call:
        run = given.encoder("reference")
        return Call(lambda: run().flip(0))

    assert measured(tiny("gru"), Peer("mixed up", mixed_up)).wrong


def test_a_peer_that_breaks_does_not_take_the_others_along() -> None:
    findings = measured(tiny("sru"), Peer("brittle", breaking), *PEERS["sru"][:1])
    assert [row.backend for row in findings.rows] == ["framework", "torch by step"]
    assert findings.wrong == [f"brittle on {tiny('sru')}: RuntimeError: no such instruction"]


def test_a_peer_that_computes_something_else_is_held_to_its_own_right_answer() -> None:
    ours = measured(tiny("sru"), Peer("twin", lambda given: Call(given.encoder("framework"))))
    elsewhere = Expected(torch.tensor([0]), torch.full((1, 6), 9.0), shape=(3, 6), tolerance=1e-3)
    findings = measured(
        tiny("sru"),
        Peer("of its own", lambda _: Call(lambda: torch.full((3, 6), 9.0), right=elsewhere)),
        Peer("of ours", lambda given: Call(given.encoder("framework"), right=elsewhere)),
    )
    assert [row.backend for row in ours.rows] == ["framework", "twin"]
    assert [row.backend for row in findings.rows] == ["framework", "of its own"]
    assert findings.wrong[0].startswith("of ours on sru layer v2 3 questions, 6 -> 6, float32: the answer is off by")


def test_a_missing_peer_is_left_out_with_what_to_install() -> None:
    findings = measured(tiny("qrnn"), Peer("somebody", absent))
    assert not findings.wrong
    assert list(findings.left_out) == [
        "somebody is left out: install a_package (ModuleNotFoundError: No module named 'a_package_that_nobody_has')"
    ]


@pytest.mark.parametrize("lengths", ["equal", "questions"])
def test_a_product_for_each_gate_agrees(lengths: str) -> None:
    findings = measured(tiny("lstm", lengths=lengths), Peer("torch by gate", lstm_gates))
    assert not findings.wrong
    assert findings.rows[-1].backend == "torch by gate" and findings.rows[-1].agrees < 1e-5


@pytest.mark.parametrize(
    "workload, peer",
    [
        (tiny("qrnn"), Peer("elsewhere", breaking, devices=("cuda",))),
        (tiny("qrnn"), Peer("for large ones", breaking, takes=lambda workload: workload.hidden > 6)),
        (RECURRENCE, Peer("a whole layer", breaking)),
        (tiny("sru", "folded"), Peer("a whole layer", breaking)),
    ],
    ids=["for another device", "for other workloads", "gate inputs", "token ids"],
)
def test_a_peer_that_is_not_meant_is_not_asked(workload: Workload, peer: Peer) -> None:
    findings = measured(workload, peer)
    assert [row.backend for row in findings.rows] == ["framework"]
    assert not findings.wrong and not findings.left_out


@pytest.mark.parametrize(
    "rows, hidden, device, asked",
    [
        (1, 512, "cuda", ["torch padded", "torch packed", "torch by step", "torch by gate"]),
        (8, 512, "cuda", ["torch padded", "torch packed", "torch by step"]),
        (1, 256, "cuda", ["torch padded", "torch packed"]),
        (1, 256, "cpu", ["torch padded", "torch packed", "torch by step", "onnxruntime"]),
    ],
)
def test_the_slow_loops_of_the_lstm_are_asked_where_they_tell_something(
    rows: int, hidden: int, device: str, asked: list[str]
) -> None:
    workload = Workload("lstm", rows, 64, hidden, hidden)
    assert [peer.name for peer in PEERS["lstm"] if peer.is_asked(workload, device)] == asked


def test_a_recurrence_is_given_gate_inputs_and_agrees() -> None:
    given = made_up(RECURRENCE, CPU)
    (weights,) = given.weights
    assert weights.input is None and weights.bias is None and weights.recurrent.shape == (6, 24)
    assert given.x.data.shape == (sum(given.lengths), 24)
    (row,) = measured(RECURRENCE).rows
    assert row.agrees < 1e-5


@pytest.mark.parametrize(
    "build, workload, install", [(onnx_runtime, tiny("lstm"), "onnxruntime"), (sru_package, tiny("sru"), "sru")]
)
def test_an_optional_package_says_what_to_install(
    build: Any, workload: Workload, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_there(package: str) -> None:
        raise ImportError(f"No module named {package!r}")

    monkeypatch.setattr("kernels.bench.baselines.baseline.import_module", not_there)
    (line,) = measured(workload, Peer("optional", build)).left_out
    assert line.startswith("optional is left out: install") and install in line


def test_missing_is_an_error_of_its_own() -> None:
    with pytest.raises(MissingError, match="install it"):
        wanted("a_package_that_nobody_has", "install it")


@pytest.mark.parametrize("dtype, tight", [(torch.float32, 2e-5), (torch.float16, 4e-2)], ids=str)
def test_what_a_dtype_may_be_off_grows_with_the_steps_and_the_sums_but_stays_small(dtype: torch.dtype, tight: float) -> None:
    assert tolerance(dtype, 1, 16) < tolerance(dtype, 64, 16) < tolerance(dtype, 64, 2048) < tight
