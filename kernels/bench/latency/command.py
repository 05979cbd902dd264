"""`python -m kernels.bench latency --device cuda:0`: one step of one stream, from inputs in host memory to outputs in host memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.bench.agreement import DisagreesError, ExpectedAnswer, expected_answer
from kernels.bench.baselines.layers import padded
from kernels.bench.case import BenchCase, random_case
from kernels.bench.goals.limit import HEADING, Limit
from kernels.bench.report import Setting
from kernels.bench.tables import aligned, three_digits, write_results
from kernels.bench.workload import ENCODER, Workload
from kernels.lstm import FAMILY, FUSED
from kernels.persistent.resident import Resident
from kernels.ragged import ContractError, Outputs

MODELS = ((2, 128), (3, 256), (3, 480), (6, 320), (3, 960))
"""Layers and hidden units of LSTMs in float16, with inputs as wide as the hidden vector."""
OUTPUTS, STEPS, WARM_UP = 32, 100_000, 2000
GOALS = {
    ("2 x 128", "replay"): Limit(12, "us"),
    ("2 x 128", "resident"): Limit(4.5, "us"),
    ("3 x 256", "resident"): Limit(7, "us"),
}
"""Of the 99th percentile, by model and contender."""
Loop = Callable[[Any], int]
"""Runs steps, writes the cycles of each, (steps,), and returns how many of them were answered."""


@dataclass(frozen=True)
class Model:
    """An LSTM of several layers, and a matrix of outputs. case: one step of one row."""

    case: BenchCase
    output: Tensor
    bias: Tensor

    @classmethod
    def random(cls, layers: int, hidden: int, device: torch.device) -> Model:
        workload = Workload("lstm", 1, 1, hidden, hidden, dtype="float16", kind=ENCODER, depth=layers)
        output, bias = (torch.randn(*size, OUTPUTS, device=device) * hidden**-0.5 for size in ((hidden,), ()))
        return cls(random_case(workload, device), output.half(), bias.half())

    def __str__(self) -> str:
        return f"{self.case.workload.depth} x {self.case.workload.hidden}"

    @property
    def layers(self) -> list[Any]:
        return [layer for (layer,) in self.case.levels]

    @cached_property
    def inputs(self) -> Tensor:
        """The inputs of every step in host memory."""
        return self.case.x.data.cpu()

    @cached_property
    def expected(self) -> ExpectedAnswer:
        """The outputs of the reference in float64."""
        hidden = expected_answer(self.case)
        values = hidden.values @ self.output.double() + self.bias.double()
        return ExpectedAnswer(hidden.at.cpu(), values.cpu(), (1, OUTPUTS), hidden.tolerance)


def run(device: torch.device, quick: bool, setting: Setting, out: Path | None, progress: Callable[[str], None]) -> int:
    """Print the latencies, and write them if there is a folder. Returns 1 if a contender failed or disagreed with the reference."""
    records, failed = list[dict[str, Any]](), False
    for layers, hidden in MODELS[: 2 if quick else None]:
        model = Model.random(layers, hidden, device)
        model.expected  # noqa: B018 # while a kernel stays, the first use of another kernel waits for it
        for name, contend in CONTENDERS.items():
            try:
                answer, loop = contend(model)
                error = model.expected.error(answer)
                times = _microseconds(loop, STEPS // 10 if quick else STEPS)
            except ContractError as refusal:
                progress(f"{name} refuses {model}: {refusal}")
            except (DisagreesError, RuntimeError) as failure:
                progress(f"WRONG: {name}: {failure}")
                failed = True
            else:
                percentiles = {f"p{share:g}_us": round(float(np.percentile(times, share)), 2) for share in (50, 99, 99.9)}
                measured = {"model": str(model), "contender": name, "outputs": OUTPUTS, "dtype": "float16", "steps": len(times)}
                records.append({**measured, **percentiles, "error": error, **asdict(setting)})
    text = f"latency on {setting}\n\n{_table(records)}\n\n{_goals(records)}\n"
    print(f"\n{text}")
    write_results(out, setting.file_name("latency"), records, text)
    return int(failed)


def _of_kernel(launches: bool, model: Model) -> tuple[Tensor, Loop]:
    """The kernel that stays, or the same kernel launched for each step by a graph without copies."""
    from kernels.bench.latency.loops import exchange_loop

    states = [FAMILY.zero_state(layer, 2) for layer in model.layers]
    kernel, compiled = Resident(FUSED, model.layers, states, model.output, model.bias), exchange_loop(launches)
    vectors = kernel.requests.clone(), kernel.requests, kernel.answers
    inputs, requests, answers = (each.numpy() for each in vectors)
    compiled(0, requests, inputs, answers, 0, 0, np.zeros(0, np.int64))  # compiles it
    step, graph = (kernel.vectors(model.inputs)[0], 0, 1), None
    if launches:
        graph = _captured(partial(kernel.launch, 1))
        kernel.send(*step)
        graph.replay()
        torch.cuda.synchronize()
        answer = kernel.received()
    else:
        answer = kernel.step(*step)
    assert answer is not None
    inputs[:], executable = requests, 0 if graph is None else graph.raw_cuda_graph_exec()

    def loop(measured: Any, _kept: object = (graph, vectors)) -> int:
        arguments = executable, torch.cuda.current_stream().cuda_stream, measured
        answered: int = compiled(kernel.number, requests, inputs, answers, *arguments)
        kernel.number += answered
        if answered < len(measured) or len(measured) > WARM_UP:
            kernel.stop()
        return answered

    return torch.from_numpy(answer)[None], loop


def _of_layers(model: Model) -> tuple[Tensor, Loop]:
    """The layers as they run for any batch, in a graph with its copies."""
    states = [FAMILY.zero_state(layer, 1) for layer in model.layers]
    return _replayed(model, lambda: FAMILY.levels(model.case.x, model.layers, states, want=Outputs(last=True)).last)


def _of_torch(model: Model) -> tuple[Tensor, Loop]:
    """torch.nn.LSTM, that is cuDNN, in a graph with its copies. Its state stays as it is."""
    with torch.no_grad():
        return _replayed(model, padded(model.case).run)


def _replayed(model: Model, encode: Callable[[], Any]) -> tuple[Tensor, Loop]:
    from kernels.bench.latency.loops import replay_loop

    host, answer = model.inputs.clone().pin_memory(), torch.zeros(1, OUTPUTS).pin_memory()

    def step() -> None:
        model.case.x.data.copy_(host, non_blocking=True)
        answer.copy_(torch.addmm(model.bias, encode().half(), model.output).float(), non_blocking=True)

    step()
    graph = _captured(step)
    graph.replay()
    torch.cuda.synchronize()
    arrays = (array.numpy().view(np.int16) for array in (host, model.inputs))
    arguments = *arrays, graph.raw_cuda_graph_exec(), torch.cuda.current_stream().cuda_stream
    compiled = replay_loop()
    return answer.clone(), lambda measured, _kept=(graph, step): compiled(*arguments, measured)


CONTENDERS: dict[str, Callable[[Model], tuple[Tensor, Loop]]] = {
    "resident": partial(_of_kernel, False),
    "replay": partial(_of_kernel, True),
    "layers in a graph": _of_layers,
    "torch in a graph": _of_torch,
}
"""Each returns an answer and the loop."""


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    graph.instantiate()
    return graph


def _microseconds(loop: Loop, steps: int) -> Any:
    """Return the microseconds of some steps after a warm-up, (steps,). The thread stays on one core."""
    from kernels.bench.latency.loops import now

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    for count in (WARM_UP, max(steps, WARM_UP + 1)):
        measured, began, clock = np.zeros(count, np.int64), time.perf_counter(), now()
        if (answered := loop(measured)) != count:
            raise RuntimeError(f"{answered} of {count} steps were answered")
        per_microsecond = (now() - clock) / (time.perf_counter() - began) / 1e6
    os.sched_setaffinity(0, cores)
    return measured / per_microsecond


def _table(records: list[dict[str, Any]]) -> str:
    names = ("p50_us", "p99_us", "p99.9_us")
    lines = [[one["model"], one["contender"], *(three_digits(one[name]) for name in names)] for one in records]
    return aligned([["model", "contender", "p50 us", "p99 us", "p99.9 us"], *lines])


def _goals(records: list[dict[str, Any]]) -> str:
    p99 = {(one["model"], one["contender"]): one["p99_us"] for one in records}
    lines = (limit.line(", ".join((*goal, "p99")), p99[goal]) for goal, limit in GOALS.items() if goal in p99)
    return aligned([HEADING, *lines])
