"""Layers, pools and heads of model.toml on a GPU: the results of a CPU, by graphs where nothing waits for the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels.ragged import Ragged
from service.engine.execution.device import use_device
from service.engine.execution.device_engine import DeviceEngine
from service.ipc.messages import ModelKey
from service.metrics import Metrics
from service.modeling.encoder import Encoder
from service.modeling.spec import ModelSpec
from tests.gpu.test_engine import CPU, CUDA, LIMITS, STEPS, assert_alike, by, mixed, run
from tests.kernels.inputs import joined
from tests.modeling.test_model_words import model, random_arrays, random_rows

Table = dict[str, Any]
WORDS: dict[str, tuple[Table, ...]] = {
    "rnn": ({"kind": "rnn", "hidden": 5, "depth": 2, "bidirectional": True, "activation": "relu", "merge": "mean"},),
    "backward": ({"kind": "lstm", "hidden": 64, "direction": "backward"},),
    "merged": ({"kind": "lstm", "hidden": 64, "bidirectional": True, "merge": "sum"},),
    "lstm": ({"kind": "lstm", "hidden": 5, "projection": 3, "peepholes": True, "clip": 2.0, "learned_start": True},),
    "normed": ({"kind": "gru", "hidden": 5, "layer_norm": True, "gate_activation": "hard_sigmoid"},),
    "conv": ({"kind": "conv", "filters": 6, "width": 3, "groups": 3, "pads": (2, 0), "activation": "elu", "epsilon": 1e-3},),
    "strided": ({"kind": "conv", "filters": 6, "width": 3, "stride": 2, "padding": "same_upper"},),
    "pool": ({"kind": "pool", "reduce": "mean", "width": 2, "stride": 2}, {"kind": "dense", "width": 4, "activation": "gelu"}),
    "steps": ({"kind": "layer_norm"}, {"kind": "batch_norm"}, {"kind": "dense", "width": 9, "activation": "silu"}),
}
BY_GRAPH = {"steps", "conv", "backward", "merged"}
"""The host does not wait: fused kernels, or operations over all steps."""
HEAD = {
    "kind": "classify",
    "pool": ["last", "max", "mean"],
    "labels": ["a", "b"],
    "dense": [{"width": 4, "activation": "relu"}],
}
POOLS: dict[str, Table] = {
    "steps-of-attention": {"kind": "embed", "pool": ["attention", "first", "last_step", "sum"], "attention_width": 3},
    "many-labels": {"kind": "classify", "pool": "max", "labels": ["a", "b"], "multi_label": True},
}


@pytest.fixture(scope="module")
def specs() -> dict[str, ModelSpec]:
    plain = {"kind": "activation", "activation": "none"}
    specs = {name: model(*layers, head=HEAD) for name, layers in WORDS.items()}
    specs |= {name: model(plain, head=head) for name, head in POOLS.items()}
    specs["bag"] = model({"kind": "embedding", "width": 4}, head={"kind": "embed", "pool": "mean"}, kind="ids", vocabulary=9)
    return {name: spec.model_copy(update={"name": name, "precision": "float16"}) for name, spec in specs.items()}


def encoders(specs: dict[str, ModelSpec], device: torch.device) -> dict[ModelKey, Encoder]:
    halves = {name: {key: array.half() for key, array in random_arrays(spec).items()} for name, spec in specs.items()}
    return {ModelKey(name, "1"): Encoder(spec, halves[name], device) for name, spec in specs.items()}


@pytest.fixture(scope="module")
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture(scope="module")
def on_gpu(specs: dict[str, ModelSpec], metrics: Metrics) -> Iterator[DeviceEngine]:
    before = torch.cuda.current_stream()
    use_device(CUDA)
    yield DeviceEngine(encoders(specs, CUDA), metrics, **LIMITS)
    torch.cuda.set_stream(before)


@pytest.fixture(scope="module")
def on_cpu(specs: dict[str, ModelSpec]) -> DeviceEngine:
    return DeviceEngine(encoders(specs, CPU), Metrics(), **LIMITS)


@pytest.mark.parametrize("name", [*WORDS, *POOLS, "bag"])
def test_results_match_the_cpu(
    on_gpu: DeviceEngine, on_cpu: DeviceEngine, metrics: Metrics, specs: dict[str, ModelSpec], name: str
) -> None:
    key = ModelKey(name, "1")
    for seed in range(3):
        batch = mixed(specs[name], seed)
        assert_alike(run(on_gpu, batch), run(on_cpu, batch))
    graphs = by(metrics, key, "graph")
    assert graphs == 3 if name in (*BY_GRAPH, *POOLS, "bag") else graphs == 0
    whole = mixed(specs[name], 3, STEPS)
    assert_alike(run(on_gpu, whole), run(on_cpu, whole))


@pytest.mark.parametrize("name", ["lstm", "normed", "rnn"])
def test_states_of_whole_rows_match_the_cpu(specs: dict[str, ModelSpec], name: str) -> None:
    spec = specs[name].model_copy(update={"precision": "float32"})
    results = []
    for device in (CPU, CUDA):
        encoder = Encoder(spec, random_arrays(spec), device)
        x = joined(random_rows())
        x = Ragged(x.data.to(device), x.offsets.to(device))
        _, states = encoder.run_with_states(x, {})
        results.append(encoder.run_with_states(x, states)[1])
    assert results[1].keys() == results[0].keys()
    for state_name, expected_state in results[0].items():
        torch.testing.assert_close(results[1][state_name].cpu(), expected_state, rtol=1e-4, atol=1e-4)
