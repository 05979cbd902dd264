"""`python -m kernels.bench voice --device cuda:0`: a voice detector over one chunk of many live streams, beside its products alone.

As in Silero's detector at 16 kHz: a Fourier transform of 129 frequencies over four frames of 576 samples, their magnitudes, four dense
layers, and an LSTM that advances the state of each stream by one step. All layers run in one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.bench import timing
from kernels.bench.agreement import ExpectedAnswer, expected_answer, tolerance
from kernels.bench.baselines.comparison import step_products
from kernels.bench.case import BenchCase, random_case
from kernels.bench.goals.limit import HEADING, Limit
from kernels.bench.report import Setting
from kernels.bench.tables import aligned, write_results
from kernels.bench.workload import NEXT_STEPS, Workload
from kernels.lstm import lstm
from kernels.ragged import Outputs, Ragged

SAMPLES, FRAMES, FREQUENCIES = 576, 4, 129
DENSE = (FRAMES * FREQUENCIES, 512, 128, 64, 128)
"""Widths before and after each dense layer; the last is that of the LSTM."""
ROWS = (64, 256, 1024, 4096)
MOST = Limit(1.5, "times")
"""Of the time of the products."""


@dataclass(frozen=True)
class Voice:
    """Random weights and samples in float16. next_steps: of the LSTM."""

    samples: Tensor
    transform: Tensor
    dense: list[tuple[Tensor, Tensor]]
    next_steps: BenchCase

    @classmethod
    def random(cls, rows: int, device: torch.device) -> Voice:
        generator = torch.Generator(device).manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        dense = [(normal(*widths) * widths[0] ** -0.5, normal(widths[1])) for widths in pairwise(DENSE)]
        transform = normal(SAMPLES, FRAMES * 2 * FREQUENCIES) * SAMPLES**-0.5
        next_steps = random_case(Workload("lstm", rows, 1, DENSE[-1], DENSE[-1], dtype="float16", kind=NEXT_STEPS), device)
        halves = [(matrix.half(), bias.half()) for matrix, bias in dense]
        return cls(normal(rows, SAMPLES).half(), transform.half(), halves, next_steps)

    def layers(self, dtype: torch.dtype) -> Tensor:
        """Run the layers below the LSTM."""
        parts = (self.samples.to(dtype) @ self.transform.to(dtype)).view(-1, FRAMES, 2, FREQUENCIES)
        x = torch.hypot(parts[:, :, 0], parts[:, :, 1]).flatten(1)
        for matrix, bias in self.dense:
            x = torch._addmm_activation(bias.to(dtype), x, matrix.to(dtype))
        return x

    def run(self) -> Any:
        (layer,), x = self.next_steps.weights, Ragged(self.layers(torch.float16), self.next_steps.x.offsets)
        return lstm(x, layer, self.next_steps.state, want=Outputs(last=True)).last

    def expected(self) -> ExpectedAnswer:
        x = Ragged(self.layers(torch.float64), self.next_steps.x.offsets)
        answer = expected_answer(replace(self.next_steps, x=x))
        return ExpectedAnswer(answer.at, answer.values, answer.shape, tolerance(torch.float16, 8, SAMPLES))

    def products(self) -> Callable[[], Tensor]:
        """Return a call of the products alone."""
        inputs = [self.samples.new_ones(len(self.samples), len(matrix)) for matrix, _ in self.dense]
        of_lstm = step_products(self.next_steps).run

        def run() -> Tensor:
            torch.mm(self.samples, self.transform)
            for x, (matrix, _) in zip(inputs, self.dense, strict=True):
                torch.mm(x, matrix)
            answer: Tensor = of_lstm()
            return answer

        return run


def run(device: torch.device, quick: bool, setting: Setting, out: Path | None, progress: Callable[[str], None]) -> int:
    """Print the times, and write them if there is a folder. Raises DisagreesError for an answer that differs from the reference."""
    budget_s, records = 0.05 if quick else 0.3, list[dict[str, Any]]()
    with torch.inference_mode():
        for rows in ROWS:
            voice = Voice.random(rows, device)
            ours = timing.kernel(voice.run, voice.expected().error, budget_s)
            products = timing.kernel(voice.products(), lambda _: None, budget_s)
            spreads = {"ours": asdict(ours), "products": asdict(products)}
            records.append({"rows": rows, "dtype": "float16", **spreads, **asdict(setting)})
    lines = [
        MOST.line(
            f"{one['rows']} rows, {one['ours']['median_us']:.1f} us", one["ours"]["median_us"] / one["products"]["median_us"]
        )
        for one in records
    ]
    text = f"voice on {setting}\n\n{aligned([HEADING, *lines])}\n"
    print(f"\n{text}")
    write_results(out, setting.file_name("voice"), records, text)
    return 0
