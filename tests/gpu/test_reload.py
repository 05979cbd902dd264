"""Models that are loaded on a GPU while it answers: on a stream of their own until they serve."""

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
RELOADS, WARM = 24, 4
"""How many, and after how many of them memory is as large as it will be."""
SEGMENTS = 2
"""Of small blocks, by which memory may rise even so, as those of models that come and go lie between each other."""
SEGMENT_BYTES = 2 << 20
SHARE = 0.5
"""Of the capacity. Graphs are captured on the device that answers."""
RESERVED = "seqserve_device_reserved_bytes"


def put(root: Path, version: int) -> None:
    """A version of an embedded model that leans to other labels than those before it."""
    model = spec.read(EMBEDDED)
    arrays = store.read_arrays(EMBEDDED, model)
    arrays["head.bias"][version % len(arrays["head.bias"])] += 0.01 * version
    tokenizer = (EMBEDDED / spec.TOKENIZER).read_text()
    store.write(root / NAME / str(version), model, arrays, card="made up", tokenizer=tokenizer)


def test_reloads_under_load_lose_no_request_mix_no_versions_and_leave_no_memory_behind(tmp_path: Path) -> None:
    root = tmp_path / "models"
    put(root, 1)
    (root / NAME / POLICY).write_text('serve = "latest"')
    with serving(root, tmp_path, "--device", "cuda:0") as server, ThreadPoolExecutor(1) as thread:
        rate = SHARE * uvloop.run(Load(server, NAME).capacity())
        load_of, expected, held = Load(server, NAME), {"1": answered(server, NAME)[1]}, list[float]()
        running = thread.submit(uvloop.run, load_of.keep(rate))
        try:
            for version in range(2, RELOADS + 2):
                put(root, version)
                load(server, NAME)
                newest, expected[str(version)] = answered(server, NAME)
                assert newest == str(version)
                eventually(lambda version=version: len(server.events("unloaded")) == version - 1, within_seconds=10)  # type: ignore[misc]
                held.append(server.metric(RESERVED))
        finally:
            load_of.ended.set()
        running.result()
        print(f"{load_of.check(expected)} requests at {rate:.0f}/s, {RELOADS} reloads: 0 failed; reserved {held}")
        assert held[-1] - held[WARM] <= SEGMENTS * SEGMENT_BYTES, "each reload leaves some"
        assert server.metric("seqserve_graphs", model=NAME) > 0
