"""What the tests share: a folder of small models, one server over them, and the rule by which a skip is a failure.

With SEQSERVE_TEST_ALL=1 only a test that needs a GPU, and says so with the marker `gpu`, may be skipped.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from tests import models
from tests.serving import Server, serving

# The arrays are small, and threads that wait for each other cost more than they give.
torch.set_num_threads(1)

pytest_plugins = ["pytester"]
ALL = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """No test sees the shell's settings, in this process or in one that it starts: SEQSERVE_TEST_ALL would stop a server's start."""
    settings = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("SEQSERVE_")}
    config.stash[ALL] = settings.get("SEQSERVE_TEST_ALL") == "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _misses_a_gpu(item):
        pytest.skip("needs a GPU, and torch sees none")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not _misses_a_gpu(item):
        _fail_what_was_skipped(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A whole file may be skipped as well."""
    report = yield
    _fail_what_was_skipped(report, collector.config)
    return report


def _misses_a_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None and not torch.cuda.is_available()


def _fail_what_was_skipped(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    """A test that is expected to fail, and does, is reported as skipped too; it is left alone."""
    if config.stash[ALL] and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"SEQSERVE_TEST_ALL is 1, and this was skipped. {reason}"


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """words over text, in two versions, and sensors over float features."""
    root = tmp_path_factory.mktemp("models")
    models.words(root, version=1, seed=1)
    models.words(root, version=2, seed=2)
    models.sensors(root)
    return root


@pytest.fixture(scope="session")
def server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that tests share: they leave it as they found it."""
    with serving(models_folder, tmp_path_factory.mktemp("log")) as running:
        yield running
