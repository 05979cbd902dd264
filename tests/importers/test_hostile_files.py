"""Files of every kind that are damaged, or archives that are made to harm, are refused with the reason."""

from __future__ import annotations

import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from service.importers.draft import ImportRefused
from tests.importers.hostile import KINDS, assert_refused, changed, good, unzipped, write, zipped
from tests.importers.importing import import_file

INCOMPLETE = {
    "model.onnx": "export the model again",
    "model.h5": "is not a complete HDF5 file",
    "model.keras": "is not a complete",
    "model.pt2": "is no archive of torch|has no module",
    "traced.pt": "is no archive of torch",
    "weights.pt": "is no archive of torch.save|is damaged",
    "weights.safetensors": "is not a complete safetensors file",
}


@pytest.mark.parametrize("name, message", INCOMPLETE.items())
def test_file_imports_and_truncated_is_refused(name: str, message: str, tmp_path: Path) -> None:
    content = good(name)
    for kept in (0.0, 0.6, 0.99):
        assert_refused(write(tmp_path, name, content[: int(kept * len(content))]), message)
    assert KINDS[name][1](write(tmp_path, name, content))


@pytest.mark.parametrize("name", INCOMPLETE)
def test_changed_bytes_import_or_are_refused(name: str, tmp_path: Path) -> None:
    """No change of a file, or of a member of an archive, leads to another exception than the refusal."""
    random, read = np.random.default_rng(0), KINDS[name][1]
    is_archive = zipfile.is_zipfile(write(tmp_path, name, good(name)))
    members = {name: content for name, content in unzipped(good(name)).items() if content} if is_archive else {"": good(name)}
    for _ in range(20 if is_archive else 60):
        member = list(members)[random.integers(len(members))]
        content = np.frombuffer(members[member], np.uint8).copy()
        content[random.integers(len(content), size=3)] = random.integers(256, size=3)
        damaged = {**members, member: content.tobytes()}
        with suppress(ImportRefused):
            read(write(tmp_path, name, zipped(damaged) if is_archive else damaged[""]))


@pytest.mark.parametrize("name", ["model.keras", "model.pt2", "traced.pt"])
def test_names_outside_an_archive_are_never_written(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    KINDS[name][1](changed(folder, name, lambda members: members.update({"../../outside": b"x", "/outside": b"x"})))
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]
    assert [path.name for path in folder.iterdir()] == [name]


@pytest.mark.parametrize(
    "name, message",
    [
        ("model.keras", "is compressed or a link"),
        ("model.pt2", "torch compresses only code"),
        ("traced.pt", "torch compresses only code"),
        ("weights.pt", r"is compressed, which torch\.save does not do"),
    ],
)
def test_compressed_archive_is_refused_before_it_expands(name: str, message: str, tmp_path: Path) -> None:
    bomb = zipped({**unzipped(good(name)), "model/bomb.py": bytes(40 << 20)}, zipfile.ZIP_DEFLATED)
    assert_refused(write(tmp_path, name, bomb), message)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "name, end, message",
    [
        ("model.keras", "config.json", r"has 2 files config\.json"),
        ("model.pt2", "models/model.json", "has two members with the name"),
        ("traced.pt", "data.pkl", "has two members with the name"),
    ],
)
def test_two_members_of_a_name_are_refused(name: str, end: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, name, good(name))
    with zipfile.ZipFile(file, "a") as opened:
        opened.writestr(next(name for name in opened.namelist() if name.endswith(end)), b"{}")
    assert_refused(file, message)


@pytest.mark.parametrize("name", ["model.pt2", "traced.pt"])
def test_members_that_overlap_are_refused(name: str, tmp_path: Path) -> None:
    """A stored member cannot claim more bytes than the file has."""
    file = write(tmp_path, name, good(name))
    with zipfile.ZipFile(file) as opened:
        info = next(one for one in opened.infolist() if one.filename.endswith(("data/0", "weight_0")))
    content = bytearray(good(name))
    start = content.rindex(info.filename.encode()) - 46  # its entry in the directory at the end
    assert content[start + 24 : start + 28] == info.file_size.to_bytes(4, "little")
    content[start + 20 : start + 28] = (1 << 30).to_bytes(4, "little") * 2
    assert_refused(write(tmp_path, name, bytes(content)), "expands to")


@pytest.mark.parametrize("name", ["absent.pt", "."])
def test_checkpoint_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImportRefused, match="is not a file: name the checkpoint"):
        import_file(tmp_path, tmp_path / name)


def test_unknown_suffix_asks_for_the_format(tmp_path: Path) -> None:
    file = write(tmp_path, "weights.dat", good("weights.pt"))
    with pytest.raises(ImportRefused, match=r"the name weights\.dat does not tell the format: add --format pytorch\|keras"):
        import_file(tmp_path, file)
    assert import_file(tmp_path, file, format="pytorch")
