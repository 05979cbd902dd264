"""Imports go one way. This reads every import of the house, those inside functions included, and says so."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("service", "kernels", "loadtest")

LEAVES = {
    "service.ipc.messages",
    "service.errors",
    "service.metrics",
    "service.frontend.oip.statistics",
    "service.settings",
    "service.log",
}
"""Knobs, error tree, time series, structured lines and the values that travel."""

MAY_IMPORT: dict[str, set[str]] = {
    # What a part may import besides itself and the version in service/__init__.py. The longest name that fits a module holds.
    "kernels": set(),
    # a caller of a server that may run elsewhere: it knows how long questions are, and how a machine is named
    "loadtest": {"kernels.bench"},
    "loadtest.bench_codec": {"kernels.bench", "loadtest", "service.frontend"},
    "loadtest.bench_endpoints": {"kernels.bench", "loadtest", "service.frontend"},
    # it writes what the faces read
    "loadtest.oip_requests": {"service.frontend"},
    "loadtest.made_up": {"service.modeling"},
    "loadtest.sensors": {"loadtest", "service.modeling"},
    "loadtest.bench_devices": {"kernels.bench", "loadtest", "service.modeling"},
    "loadtest.bench_engine": {"kernels.bench", "loadtest", "service"},
    "loadtest.open_engine": {"kernels.bench", "loadtest", "service"},
    # the scheduler itself on a virtual clock, with costs that an engine measured
    "loadtest.simulation": {
        "kernels.bench",
        "loadtest",
        "service.engine.batching.scheduler",
        "service.engine.execution.cost_model",
        "service.ipc.messages",
    }
    | {"service.settings"},
    "loadtest.simulation.costs": {"kernels.bench", "loadtest", "service"},
    "service.ipc.messages": LEAVES,
    "service.errors": LEAVES,
    "service.metrics": LEAVES,
    "service.frontend.oip.statistics": LEAVES,
    "service.settings": LEAVES,
    "service.log": LEAVES,
    "service.ipc.channel": set(),
    "service.ipc.process_config": LEAVES | {"service.ipc.channel"},
    # faces -> channel, and what a model is
    "service.frontend": LEAVES | {"service.ipc.channel", "service.modeling.spec", "service.modeling.tokenizer"},
    "service.frontend.server": LEAVES | {"service.frontend", "service.ipc.channel", "service.ipc.process_config"},
    # worker -> batching -> engine -> zoo -> kernels
    "service.engine.worker": LEAVES
    | {
        "service.engine.batching",
        "service.engine",
        "service.ipc.channel",
        "service.ipc.process_config",
        "service.engine.loading",
        "service.engine.profiling.session",
    },
    "service.engine.loading": LEAVES | {"service.engine.batching", "service.engine"},
    "service.engine.profiling.session": LEAVES
    | {"service.engine.batching", "service.engine", "service.ipc.channel", "service.ipc.process_config"},
    "service.engine.batching": LEAVES | {"service.engine", "service.modeling.spec"},
    "service.engine.batching.scheduler": LEAVES | {"service.engine.execution.cost_model"},
    "service.engine": LEAVES | {"service.modeling", "kernels"},
    "service.engine.batch": LEAVES,
    "service.engine.execution.cost_model": set(),
    "service.engine.batching.state_slots": LEAVES,
    "service.modeling": LEAVES | {"kernels"},
    "service.modeling.spec": LEAVES,
    "service.modeling.tokenizer": LEAVES | {"service.modeling.spec"},
    # supervisor -> changes -> child, gathering, repository
    "service.supervisor.reload": LEAVES
    | {"service.ipc.channel", "service.supervisor.process", "service.supervisor.repository"},
    "service.supervisor.repository": LEAVES | {"service.modeling.spec"},
    "service.supervisor.process": LEAVES | {"service.ipc.channel", "service.ipc.process_config"},
    "service.supervisor.metrics_aggregator": LEAVES
    | {"service.ipc.channel", "service.ipc.process_config", "service.supervisor.process"},
    # who builds and ends the others sees everyone
    "service.app": set(PACKAGES),
    "service.supervisor": set(PACKAGES),
    "service.cli": set(PACKAGES),
    "service.__main__": set(PACKAGES),
    "service": set(),
}

WEB = {"fastapi", "starlette", "uvicorn", "httptools", "websockets", "grpc", "aiohttp"}
TENSORS = {"torch", "cupy", "safetensors"}
NEVER_IMPORTS = {
    "kernels": WEB | {"pydantic", "msgspec", "prometheus_client"},
    "service.modeling": WEB,
    "service.engine": WEB,
    "service.engine.batching": WEB,
    "service.engine.worker": WEB,
    "service.engine.batching.scheduler": TENSORS | {"numpy", "time"},
    "service.engine.batch": TENSORS | {"numpy"},
    "service.engine.execution.cost_model": TENSORS | {"numpy"},
    "service.engine.batching.state_slots": TENSORS | {"numpy"},
    "service.ipc.messages": WEB | TENSORS,
    "service.errors": WEB | TENSORS | {"grpc", "http"},
    "service.ipc.channel": WEB | TENSORS,
    "service.frontend": TENSORS,
    "service.frontend.server": TENSORS,
    "service.modeling.spec": TENSORS,
    "service.modeling.tokenizer": TENSORS,
}
NEVER_LOADS = {
    # A front never loads torch, an engine never loads a web framework, and who only starts them loads neither.
    "service.engine.batching.scheduler": WEB | TENSORS | {"numpy"},
    "service.frontend.server": TENSORS,
    "service.frontend.app": TENSORS,
    "service.modeling.tokenizer": TENSORS,
    "service.engine.worker": WEB,
    "service.supervisor": WEB | TENSORS,
    "service.cli": WEB | TENSORS,
}
NOWHERE = {
    # Whoever can put a file into a models folder must not run code, and a duration is no difference of wall clocks.
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"),
    *("torch.load", "numpy.load", "np.load", "torch.jit.load", "torch.hub.load"),
    *("time.time", "time.time_ns", "eval", "exec"),
}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the house, parsed."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return {name: ast.parse(file.read_text(), str(file)) for name, file in zip(names, files, strict=True)}


def imported(name: str) -> Iterator[str]:
    """Dotted names of what a module imports; of `from a import b` it is a.b when that is a module of the house, else a."""
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{name} line {node.lineno}: imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (one if one in modules() else node.module for one in whole)


def mentioned(name: str) -> Iterator[str]:
    """Everything that a module imports, takes from a module or calls by a bare name, dotted."""
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def within(module: str, part: str) -> bool:
    return module == part or module.startswith(f"{part}.")


def part_of(module: str) -> str:
    """The longest name in the table that fits."""
    return max((part for part in MAY_IMPORT if within(module, part)), key=len)


@pytest.mark.parametrize("name", modules())
def test_imports_go_one_way(name: str) -> None:
    mine = part_of(name)
    house = {one for one in imported(name) if one.partition(".")[0] in PACKAGES and one != "service"}
    wrong = {one for one in house if not any(within(one, other) for other in (mine, *MAY_IMPORT[mine]))}
    assert not wrong, f"{name} is in {mine}, which may import {sorted(MAY_IMPORT[mine])}"


@pytest.mark.parametrize("name", sorted(modules().keys() - {"service"}))
def test_every_module_has_a_place_in_the_table(name: str) -> None:
    assert part_of(name) != "service"


@pytest.mark.parametrize("part", MAY_IMPORT.keys() | NEVER_IMPORTS.keys() | NEVER_LOADS.keys())
def test_the_tables_name_only_what_exists(part: str) -> None:
    assert part in modules()


def test_no_module_imports_itself_by_a_detour() -> None:
    house = modules()
    graph = {name: {one for one in imported(name) if one in house and not within(name, one)} for name in house}
    assert set(TopologicalSorter(graph).static_order()) == set(house)


@pytest.mark.parametrize("part", NEVER_IMPORTS)
def test_a_part_does_not_import_what_it_must_not_know(part: str) -> None:
    known = {one.partition(".")[0] for name in modules() if within(name, part) for one in imported(name)}
    assert not known & NEVER_IMPORTS[part]


@pytest.mark.parametrize("module", NEVER_LOADS)
def test_a_module_does_not_load_what_it_must_not_know_by_a_detour_either(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert module in loaded.split()
    assert not set(loaded.split()) & NEVER_LOADS[module]


@pytest.mark.parametrize("name", modules())
def test_nothing_unpickles_evaluates_or_reads_the_wall_clock(name: str) -> None:
    assert not {one for one in mentioned(name) if any(within(one, other) for other in NOWHERE)}
