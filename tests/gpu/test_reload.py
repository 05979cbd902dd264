"""Reloads of models on a GPU that serves requests. Each model is prepared on its own stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop

from service.modeling import spec, store
from service.supervisor.repository import POLICY
from tests.reloading import Load, answered, load
from tests.serving import eventually, serving

EMBEDDED = Path(__file__).resolve().parent.parent.parent / "models" / "question-type-cnn" / "1"
NAME = EMBEDDED.parent.name
RELOADS, WARM = 12, 4
"""Number of reloads, and of reloads until the memory has its final size."""
GROWTH_BYTES = 4 << 20
"""By which the memory may still grow, two segments: blocks of old and new models fragment them."""
SHARE = 0.5
"""Share of the capacity that the load uses: the same device captures the graphs."""
RESERVED = "seqserve_device_reserved_bytes"


def put(root: Path, version: int) -> None:
    """Write a version of an embedded model that prefers another label than the versions before it."""
    model = spec.read(EMBEDDED)
    arrays = store.read_arrays(EMBEDDED, model)
    arrays["head.bias"][version % len(arrays["head.bias"])] += 0.01 * version
    tokenizer = (EMBEDDED / spec.TOKENIZER).read_text()
    store.write(root / NAME / str(version), model, arrays, card="made up", tokenizer=tokenizer)


def test_reloads_under_load_lose_no_request_and_no_memory(tmp_path: Path) -> None:
    root = tmp_path / "models"
    put(root, 1)
    (root / NAME / POLICY).write_text('serve = "latest"')
    with serving(root, tmp_path, "--device", "cuda:0") as server, ThreadPoolExecutor(1) as thread:
        rate = SHARE * uvloop.run(Load(server, NAME).capacity())
        load_of, expected, reserved = Load(server, NAME), {"1": answered(server, NAME)[1]}, list[float]()
        running = thread.submit(uvloop.run, load_of.keep(rate))
        try:
            for version in range(2, RELOADS + 2):
                put(root, version)
                load(server, NAME)
                newest, expected[str(version)] = answered(server, NAME)
                assert newest == str(version)
                eventually(lambda version=version: len(server.events("unloaded")) == version - 1, within_seconds=10)  # type: ignore[misc]
                reserved.append(server.metric(RESERVED))
        finally:
            load_of.ended.set()
        running.result()
        print(f"{load_of.check(expected)} requests at {rate:.0f}/s, {RELOADS} reloads: 0 failed; reserved {reserved}")
        assert reserved[-1] - reserved[WARM] <= GROWTH_BYTES, "each reload leaves memory reserved"
        assert server.metric("seqserve_graphs", model=NAME) > 0
