"""A confined process reads no file outside of the models folder, whatever links lead there, and whatever is swapped while it reads."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.errors import ModelError
from service.modeling.spec import MODEL, TOKENIZER, WEIGHTS, ModelSpec, files, read, read_verified

SWAPS = 300
OWN, SECRET, REFUSED = b"own", b"secret", b"refused"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """The models folder of a confined process, with a version of a model; a secret is next to it."""
    folder = tmp_path / "models" / "words" / "1"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(OWN)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "weights").write_bytes(SECRET)
    with files.confined(tmp_path / "models"):
        yield tmp_path / "models"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return tmp_path / "outside"


def refused(file: Path) -> bool:
    with pytest.raises(OSError, match="out of the models folder"):
        files.read_file(file)
    return True


def test_links_to_the_outside_are_refused(root: Path, outside: Path) -> None:
    """Of a file, and of a folder around it."""
    for target in (outside / "weights", Path("../../../outside/weights"), Path("/proc/self/environ")):
        link = root / "words" / "1" / "link"
        link.symlink_to(target)
        assert refused(link)
        link.unlink()
    (root / "words" / "2").symlink_to(outside)
    (root / "other").symlink_to(outside.parent)
    assert refused(root / "words" / "2" / "weights")
    assert refused(root / "other" / "outside" / "weights")
    assert refused(root / "words" / ".." / ".." / "outside" / "weights")


def test_links_within_the_folder_are_followed(root: Path) -> None:
    """As in the volumes of Kubernetes, where a version is a link to a folder next to it."""
    (root / "words" / "2").symlink_to("1")
    (root / "words" / "1" / "again").symlink_to(root / "words" / "1" / "weights")
    assert files.read_file(root / "words" / "2" / "again") == OWN


def test_models_folder_may_be_a_link_that_changes(root: Path, outside: Path) -> None:
    current = root.parent / "current"
    current.symlink_to(root)
    with files.confined(current):
        assert files.read_file(current / "words" / "1" / "weights") == OWN
        current.unlink()
        current.symlink_to(outside)
        assert files.read_file(current / "weights") == SECRET
        assert refused(root / "words" / "1" / "weights")
    assert files.read_file(root / "words" / "1" / "weights") == OWN, "the confinement ends"


def test_system_without_proc_refuses_links_too(root: Path, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readlink = os.readlink

    def without_proc(path: str) -> str:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", without_proc)
    link = root / "words" / "1" / "link"
    link.symlink_to(outside / "weights")
    assert refused(link)
    assert files.read_file(root / "words" / "1" / "weights") == OWN


def test_swapped_files_are_never_those_outside(root: Path, outside: Path) -> None:
    """A link, and a folder of a file, are swapped for links out of the folder. More reads follow until both were seen."""
    kept = root / "words" / "1"
    for place, own, other in ((kept / "swapped", kept / "weights", outside / "weights"), (root / "words" / "3", kept, outside)):
        place.symlink_to(own)
        ended, found = threading.Event(), Counter[bytes]()

        def swap(place: Path = place, targets: tuple[Path, Path] = (other, own), ended: threading.Event = ended) -> None:
            while not ended.is_set():
                for target in targets:
                    link = place.with_name("next")
                    link.symlink_to(target)
                    link.rename(place)

        thread = threading.Thread(target=swap)
        thread.start()
        try:
            while found.total() < SWAPS or not found.keys() >= {OWN, REFUSED}:
                try:
                    found[files.read_file(place if own.is_file() else place / "weights")] += 1
                except PermissionError:
                    found[REFUSED] += 1
        finally:
            ended.set()
            thread.join()
        assert found.keys() == {OWN, REFUSED}, found


@pytest.mark.parametrize("name", [MODEL, TOKENIZER, WEIGHTS])
def test_sparse_file_is_refused_before_it_is_read(name: str, folder: Path, model: ModelSpec) -> None:
    os.truncate(folder / name, 1 << 40)
    with pytest.raises(ModelError, match=rf"{name}.* it has 1099511627776 bytes, and at most \d+ are read"):
        if name == MODEL:
            read(folder)
        else:
            read_verified(folder / name, model)


def test_unfinished_file_replaces_nothing(tmp_path: Path) -> None:
    """A device is written to as it is: a rename would replace it. A link stays, and so does the mode of the file."""
    file, link = tmp_path / "model.pt", tmp_path / "link"
    link.symlink_to(file)
    for place in (file, link):
        with files.replacing(place) as written:
            written.write_text(place.name)
        file.chmod(0o640 if place is file else file.stat().st_mode)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    with pytest.raises(ModelError, match=r"model\.pt cannot be written: full"), files.replacing(file) as written:
        written.write_text("thi")
        raise OSError(errno.ENOSPC, "full")
    assert {path.name for path in tmp_path.iterdir()} == {"link", "model.pt"} and file.read_text() == link.read_text() == "link"
    with files.replacing(Path(os.devnull)) as written:
        assert written == Path(os.devnull)
