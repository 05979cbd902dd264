"""A full disk, and a cache folder that cannot be written: requests are answered, and no model is half visible."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.cpu import cache
from kernels.cpu.target import host_target
from kernels.folder import CACHE
from service.modeling import spec
from tests import models
from tests.full_disk import full_disk
from tests.reloading import answered, load
from tests.serving import Server, answering, check_unharmed, eventually, serving
from tests.steady import processes

BODY = {"model": "words", "inputs": ["how far is the sea ?"]}
COMPILED_BYTES = 4096
"""Room on the disk of a compiler: less than the code of one function."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server and its models folder."""
    scratch = tmp_path_factory.mktemp("disk")
    models.words(scratch / "models")
    with serving(scratch / "models", scratch, "--debug", "--device", "cpu") as server:
        yield server, scratch / "models"


def test_requests_and_loads_continue_on_a_full_disk(served: tuple[Server, Path]) -> None:
    """Loading a version writes nothing. The lines of the log that are dropped meanwhile are counted later."""
    server, root = served
    shutil.copytree(root / "words" / "1", root / "words" / "2")
    changes = len(server.events("changed"))
    with answering(server, BODY, BODY):
        with full_disk(processes(server).values()):
            load(server, "words")
            assert answered(server)[0] == "2"
            assert len(server.events("changed")) == changes, "the log could not be written"
        load(server, "words")
        eventually(lambda: server.events("log lines dropped"))
    check_unharmed(server)


def test_half_copied_version_is_not_visible_and_its_rest_is(served: tuple[Server, Path]) -> None:
    """The disk is full in the middle of the copy. The version is served once the copy is complete."""
    server, root = served
    source, folder = root / "words" / "1", root / "words" / "3"
    folder.mkdir()
    shutil.copy(source / spec.MODEL, folder)
    content = (source / spec.WEIGHTS).read_bytes()
    (folder / spec.WEIGHTS).write_bytes(content[: len(content) // 2])
    with full_disk(processes(server).values()), answering(server, BODY):
        assert "3/" in load(server, "words", status=400)["error"]
        assert answered(server)[0] != "3"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    load(server, "words")
    assert answered(server)[0] == "3"


def test_trace_that_cannot_be_written_fails_alone(served: tuple[Server, Path]) -> None:
    """A trace goes through a file. Without room for it there is an error, requests are answered, and the next trace works."""
    server, _ = served
    with answering(server, BODY):
        with full_disk(processes(server).values()):
            answer = server.client.post("/debug/trace", params={"batches": 2})
            assert answer.status_code >= 500, answer.text
            assert answered(server)
        assert server.client.post("/debug/trace", params={"batches": 2}).status_code == 200


def test_service_without_a_cache_folder_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is in the path of the folder, so it cannot be created. Models run without compiled code, and the log has a warning."""
    models.words(tmp_path / "models")
    with serving(tmp_path / "models", tmp_path, "--device", "cpu") as usual:
        expected = answered(usual)[1]
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "cache"))
    with serving(tmp_path / "models", tmp_path, "--device", "cpu") as server:
        assert answered(server)[1] == pytest.approx(expected, abs=1e-5)
        [warning] = server.events("cpu kernels not compiled")
        assert "cannot be written" in warning["reason"]
        check_unharmed(server)


@pytest.mark.skipif(host_target() is None, reason="this processor has no compiled kernels")
def test_kernels_that_are_compiled_in_part_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full while they are compiled: the folder is not complete, so no service reads it."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    compiling = subprocess.run(
        [sys.executable, "-m", "kernels.cpu"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (COMPILED_BYTES, COMPILED_BYTES)),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert compiling.returncode != 0
    assert os.strerror(errno.EFBIG) in compiling.stderr, "the last line has the reason"
    assert not list(tmp_path.rglob(cache.COMPLETE))
    assert cache.missing() == cache.NOT_COMPILED
