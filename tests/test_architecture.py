"""Imports point one way (docs/architecture.md), including imports inside functions."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = {"service.ipc", "service.cores", "service.errors", "service.log", "service.metrics", "service.settings"}
EXPOSITION = {"service.exposition", "service.triton_statistics"}
EVERYTHING = {"service", "loadtest"}
SCHEDULERS = {
    f"service.engine.batching.{name}"
    for name in (
        "admission",
        "scheduler",
        "selection",
        "fair_shares",
        "memory_limits",
        "model_queue",
        "request_block",
        "tenant_queue",
    )
}
SCHEDULING = {
    *SCHEDULERS,
    *("service.engine.batching.due", "service.engine.execution.cost_model"),
    *("service.errors", "service.ipc.blocks", "service.ipc.messages"),
}
"""The code that decides about batches knows neither a device nor a client."""
MAY_IMPORT: dict[str, set[str]] = {  # the rule with the longest matching name holds; a part may always import from itself
    "loadtest": {"kernels.bench", "service"},
    "kernels": set(),
    "service": set(),
    **{f"service.{name}": EVERYTHING for name in ("__main__", "cli")},
    "service.local": {*EVERYTHING, "kernels"},
    **{f"service.{name}": {"service.errors"} for name in ("errors", "log", "settings", "metrics")},
    "service.triton_statistics": {"service.errors", "service.metrics"},
    "service.exposition": {"service.metrics", "service.triton_statistics"},
    "service.cores": {"service.control_groups", "service.settings"},
    "service.memory_limit": {"service.control_groups"},
    "service.client_access": {"service.errors", "service.settings"},
    "service.flags": {"service.settings"},
    "service.ipc": {"service.errors", "service.metrics", "service.settings"},
    "service.modeling": {"kernels", "service.errors", "service.ipc.messages"},
    "service.modeling.spec": {"service.errors"},
    "service.engine": {"kernels", "service.memory_limit", "service.modeling", *SHARED},
    **dict.fromkeys(SCHEDULERS, SCHEDULING),
    "service.importers": {"kernels", "service.modeling", "service.cores", "service.errors", "service.settings"},
    "service.exporters": {"kernels", "service.modeling", "service.importers.draft", "service.errors", "service.settings"},
    "service.compress": {"kernels", "service.modeling", "service.cores", "service.errors", "service.settings"},
    "service.access": {"service.errors", "service.ipc.messages", "service.settings"},
    "service.frontend": {
        *("service.access", "service.memory_limit", "service.modeling.spec", "service.modeling.tokenizer"),
        *(*EXPOSITION, *SHARED),
    },
    "service.tracer": SHARED,
    "service.store": {*SHARED},
    "service.supervisor": {"service.access", "service.modeling.spec", *EXPOSITION, *SHARED},
}
WEB = {"fastapi", "starlette", "uvicorn", "httptools", "websockets", "grpc", "aiohttp"}
TENSORS = {"torch", "cupy", "safetensors"}
NEVER_LOADS = {
    "kernels.lstm, kernels.conv": {*WEB, "pydantic", "msgspec", "prometheus_client"},
    "service.engine.batching.scheduler": {*WEB, *TENSORS},
    "service.engine.start, service.modeling.encoder": WEB,
    "service.frontend.__main__": TENSORS,
    "service.tracer.__main__": TENSORS,
    "service.store.__main__": {*WEB, *TENSORS},
    "service.supervisor.supervisor": {*WEB, *TENSORS},
    "service.cli": {*WEB, *TENSORS},
}
FORBIDDEN = {
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch.load", "numpy.load", "np.load"),
    *("torch.jit.load", "torch.export.load", "torch.hub.load", "time.time", "time.time_ns", "eval", "exec"),
}
ALLOWED = {"service.importers.pytorch.files": {"torch.load"}}  # it reads weights only
FILES = [file for package in ("service", "kernels", "loadtest") for file in (ROOT / package).rglob("*.py")]
NAMES = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in FILES]
MODULES = {name: ast.parse(file.read_text()) for name, file in zip(NAMES, FILES, strict=True)}


def imported(name: str) -> set[str]:
    return imports_of(ast.walk(MODULES[name]))


def imports_of(walked: Iterable[ast.AST]) -> set[str]:
    nodes = list(walked)
    pairs = [(node.module, alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {f"{parent}.{child}" if f"{parent}.{child}" in MODULES else str(parent) for parent, child in pairs} | plain


def mentioned(name: str) -> set[str]:
    """Every import, attribute and bare call, dotted."""
    nodes = list(ast.walk(MODULES[name]))
    calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    children = {f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return imported(name) | children | calls | {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}


def test_modules_import_only_what_their_part_may() -> None:
    wrong = []
    for name in MODULES:
        part = max((part for part in MAY_IMPORT if f"{name}.".startswith(f"{part}.")), key=len)
        allowed = tuple(f"{other}." for other in (part, *MAY_IMPORT[part]))
        found = (imported(name) - {"service"}) & MODULES.keys()
        wrong += [f"{name} imports {other}" for other in found if not f"{other}.".startswith(allowed)]
    assert wrong == []


def test_no_module_runs_code_of_a_file_or_reads_the_wall_clock() -> None:
    forbidden = tuple(f"{bad}." for bad in FORBIDDEN)
    words = {name: mentioned(name) - ALLOWED.get(name, set()) for name in MODULES}
    assert [(name, word) for name in words for word in words[name] if f"{word}.".startswith(forbidden)] == []


def test_checkpoints_are_read_without_their_code() -> None:
    calls = [node for node in ast.walk(MODULES["service.importers.pytorch.files"]) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    assert loads and all("weights_only=True" in ast.unparse(call) for call in loads)


def test_public_class_names_have_one_definition() -> None:
    classes = Counter(
        (name.partition(".")[0], node.name)
        for name, module in MODULES.items()
        for node in module.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not name.startswith("loadtest")
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_no_import_cycle() -> None:
    TopologicalSorter({name: (imported(name) & MODULES.keys()) - {name} for name in MODULES}).prepare()


def loaded_by(name: str) -> set[str]:
    """Return everything that an import of a module imports, without the imports of functions that it does not call."""
    found, left = set[str](), [name]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            parents = [module.rsplit(".", count)[0] for count in range(1, module.count(".") + 1)]
            left += [other for other in parents if other in MODULES]
            left += imports_of(statements(MODULES[module])) if module in MODULES else []
    return {module.partition(".")[0] if module not in MODULES else module for module in found}


def statements(module: ast.Module) -> Iterator[ast.AST]:
    """Yield what runs at an import: neither functions nor blocks for type checkers."""
    left: list[ast.AST] = [*module.body]
    while left:
        node = left.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            left += [] if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else ast.iter_child_nodes(node)


@pytest.mark.parametrize("modules", NEVER_LOADS)
def test_process_does_not_load_the_libraries_of_another(modules: str) -> None:
    loaded = set().union(*map(loaded_by, modules.split(", ")))
    assert len(loaded) > 2 and not NEVER_LOADS[modules] & loaded
