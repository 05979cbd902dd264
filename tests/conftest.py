"""Fixtures and hooks of all tests: small models, one shared server, and the rules for skipped tests.

With SEQSERVE_TEST_ALL=1 a skipped test fails, unless it has the marker `gpu` and there is no GPU.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests import models, planted
from tests.planted import Gate
from tests.serving import Server, serving

# The arrays are small: threads would wait for each other for longer than they compute.
torch.set_num_threads(1)

# How long an example takes depends on the other work of the machine.
settings.register_profile("any machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("first failure", settings.get_profile("any machine"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("any machine")

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
ALL = pytest.StashKey[bool]()
MARKERS = (
    "server: starts servers; set here, and left out by make test-fast",
    "slow: computes for seconds; left out by make test-fast",
)


class WithoutAddress:
    """Names a parameter as `name` does, without the addresses of functions in it."""

    def __init__(self, name: Callable[[object], object]) -> None:
        self._name = name

    def __call__(self, value: object) -> str | None:
        name = self._name(value)
        return None if name is None else ADDRESS.sub("", str(name))


def pytest_configure(config: pytest.Config) -> None:
    """Hide the shell's settings from the tests and their child processes. SEQSERVE_TEST_ALL would stop a server's start."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    settings = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("SEQSERVE_")}
    # A worker of pytest-xdist starts after its controller has removed the variable, so the controller sends the value.
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    config.stash[ALL] = worker.get("all", settings.get("SEQSERVE_TEST_ALL") == "1")
    if worker:
        # Workers share the cores, and so do the servers that they start.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the controller's SEQSERVE_TEST_ALL to a worker of pytest-xdist."""
    node.workerinput["all"] = node.config.stash[ALL]


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Keep addresses of functions out of the names of parametrised tests: all workers of pytest-xdist must find the same names."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        ids = mark.kwargs.get("ids")
        if callable(ids) and not isinstance(ids, WithoutAddress):
            mark.kwargs["ids"] = WithoutAddress(ids)  # type: ignore[index]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start servers, and run them first: they take longest, and short tests then fill the last gap."""
    for item in items:
        if _starts_servers(item):
            item.add_marker("server")
    modules = {getattr(item, "module", None) for item in items if item.get_closest_marker("server")}
    items.sort(key=lambda item: (getattr(item, "module", None) not in modules, item.get_closest_marker("slow") is None))


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from libraries and collected tests: they stay, and each full collection would visit them all."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _misses_a_gpu(item):
        pytest.skip("needs a GPU, and torch sees none")
    torch.manual_seed(0)  # the weights of a test do not depend on the tests before it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not _misses_a_gpu(item):
        _fail_skipped(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a file that is skipped as a whole."""
    report = yield
    _fail_skipped(report, collector.config)
    return report


def _module_starts_servers(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    return getattr(module, "serving", None) is serving or getattr(module, "Server", None) is Server


def _starts_servers(item: pytest.Item) -> bool:
    return _module_starts_servers(item) or "server" in getattr(item, "fixturenames", ())


def _misses_a_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None and not torch.cuda.is_available()


def _fail_skipped(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    """Turn a skip into a failure, except an expected failure, which pytest also reports as skipped."""
    if config.stash[ALL] and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"SEQSERVE_TEST_ALL is 1, and this test was skipped. {reason}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A models folder with the model `words`."""
    models.words(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture(scope="module")
def examples() -> Iterator[None]:
    """Let tests import the modules of `examples`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "examples"))
        yield


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with two versions of words, over text, and with sensors, over float features."""
    root = tmp_path_factory.mktemp("models")
    models.words(root, version=1, seed=1)
    models.words(root, version=2, seed=2)
    models.sensors(root)
    return root


@pytest.fixture(scope="session")
def server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that many tests share. A test restores its state."""
    with serving(models_folder, tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[object], None]:
    """Return a function that prints figures of a test that passes too."""

    def show(figures: object) -> None:
        with capsys.disabled():
            print(f"\n{figures}", end="")

    return show


@pytest.fixture
def without_collections() -> Iterator[None]:
    """Disable the garbage collector, so that the test sees the objects that only a collection frees."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate that holds batches of the engines in flight. They compute nothing."""
    file = tmp_path_factory.mktemp("gate") / "gate"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATE", str(file))
        planted.plant("gated-device", patch)
        yield Gate(file)
