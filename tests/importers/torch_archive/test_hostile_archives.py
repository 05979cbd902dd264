"""Archives that are damaged or made to harm are refused with the reason; no code in them runs, and they do not expand."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from service.importers.draft import ImportRefused
from service.importers.torch_archive import read

MEMORY_BYTES = 200 << 20
Change = Callable[[dict[str, bytes]], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc(x))


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Archives that import, of either kind."""
    folder, x = tmp_path_factory.mktemp("archives"), torch.randn(2, 5, 3)
    files = {"exported": folder / "model.pt2", "traced": folder / "model.pt"}
    axes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(Net(), (x,), dynamic_shapes=axes), files["exported"])
        torch.jit.save(torch.jit.trace(Net(), x), files["traced"])  # type: ignore[no-untyped-call]
    return files


@pytest.fixture
def exported(archives: dict[str, Path]) -> Path:
    return archives["exported"]


@pytest.fixture
def traced(archives: dict[str, Path]) -> Path:
    return archives["traced"]


@pytest.fixture(params=["exported", "traced"])
def archive(archives: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    return archives[request.param]


def changed(archive: Path, folder: Path, change: Change) -> Path:
    """Return a copy of an archive with other members."""
    with zipfile.ZipFile(archive) as read:
        members = {name: read.read(name) for name in read.namelist()}
    change(members)
    file = folder / archive.name
    with zipfile.ZipFile(file, "w") as written:
        for name, content in members.items():
            written.writestr(name, content)
    return file


def member(members: dict[str, bytes], end: str) -> str:
    return next(name for name in members if name.endswith(end))


def without(end: str) -> Change:
    def change(members: dict[str, bytes]) -> None:
        for name in [name for name in members if name.endswith(end)]:
            del members[name]

    return change


def edited(end: str, edit: Callable[[Any], Any]) -> Change:
    """Return a change of a description of a .pt2 archive."""

    def change(members: dict[str, bytes]) -> None:
        name = member(members, end)
        description = json.loads(members[name])
        edit(description)
        members[name] = json.dumps(description).encode()

    return change


def with_code(body: str) -> Change:
    """Return a change of a TorchScript archive that replaces the body of its forward method."""

    def change(members: dict[str, bytes]) -> None:
        name = next(name for name in members if name.endswith(".py") and b"class Net" in members[name])
        code = members[name].decode()
        members[name] = (code[: code.index("    fc = self.fc")] + body).encode()

    return change


def replaced(end: str, content: bytes) -> Change:
    return lambda members: members.update({member(members, end): content})


def assert_refused(file: Path, message: str = ".") -> None:
    """Assert that an archive is refused with these words, within bounds, and that nothing in it was executed in this folder."""
    tracemalloc.start()
    try:
        with contextlib.chdir(file.parent), pytest.raises(ImportRefused, match=message):
            read(file)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()
    assert not (file.parent / "executed").exists()


def test_archive_imports(archive: Path) -> None:
    assert [part.table["kind"] for part in read(archive).layers] == ["dense"]


@pytest.mark.parametrize("kept", [0.0, 0.4, 0.99])
def test_truncated_archive_is_refused(archive: Path, kept: float, tmp_path: Path) -> None:
    content = archive.read_bytes()
    (tmp_path / archive.name).write_bytes(content[: int(kept * len(content))])
    assert_refused(tmp_path / archive.name)


def test_changed_bytes_import_or_are_refused(archive: Path, tmp_path: Path) -> None:
    """No change of a member leads to another exception than the refusal."""
    random = np.random.default_rng(0)
    for _ in range(30):

        def change(members: dict[str, bytes]) -> None:
            name = list(members)[random.integers(len(members))]
            content = bytearray(members[name])
            for _ in range(3 if content else 0):
                content[random.integers(len(content))] = random.integers(256)
            members[name] = bytes(content)

        try:
            read(changed(archive, tmp_path, change))
        except ImportRefused as error:
            assert str(error)


def test_member_of_a_name_twice_is_refused(archive: Path, tmp_path: Path) -> None:
    file = changed(archive, tmp_path, lambda members: members.update({"other/version": b"3"}))
    with zipfile.ZipFile(file, "a") as written:
        first = written.namelist()[0]
        written.writestr(first.replace(first.partition("/")[0], "again", 1), b"")
    assert_refused(file, "has two members with the name")


def test_names_outside_the_archive_are_never_written(archive: Path, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    read(changed(archive, folder, lambda members: members.update({"../../outside": b"x", "/outside": b"x"})))
    assert [path.name for path in tmp_path.iterdir()] == ["inner"] and len(list(folder.iterdir())) == 1


def test_compressed_bomb_is_refused_before_it_expands(archive: Path, tmp_path: Path) -> None:
    file = changed(archive, tmp_path, dict.copy)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as written:
        written.writestr("model/code/bomb.py", bytes(100 << 20))
    assert_refused(file, "torch compresses only code")


def test_members_that_overlap_are_refused(archive: Path, tmp_path: Path) -> None:
    """A stored member cannot claim more bytes than the file has."""
    file = tmp_path / archive.name
    content = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as read_members:
        info = next(one for one in read_members.infolist() if one.filename.endswith(("data/0", "weight_0")))
    start = content.rindex(info.filename.encode()) - 46  # its entry in the directory at the end
    assert content[start + 24 : start + 28] == info.file_size.to_bytes(4, "little")
    content[start + 20 : start + 28] = (1 << 30).to_bytes(4, "little") * 2
    file.write_bytes(bytes(content))
    assert_refused(file, "expands to")


# torch.export


def _node(description: Any) -> Any:
    return description["graph_module"]["graph"]["nodes"][0]


def _target(name: str) -> Change:
    return edited("model.json", lambda model: _node(model).update(target=name))


def _meta(**values: Any) -> Change:
    return edited("model_weights_config.json", lambda model: model["config"]["fc.weight"]["tensor_meta"].update(values))


def _sizes(*sizes: int) -> list[dict[str, int]]:
    return [{"as_int": size} for size in sizes]


DESCRIPTIONS: list[tuple[Change, str]] = [
    (_target("os.system"), "calls os.system, which cannot be imported"),
    (_target("torch.ops.aten.from_file.default"), "has no operator from_file|linear"),
    (_target("torch.ops.aten.nonsense.default"), "torch has no operator nonsense"),
    (_target("torch.ops.mine.linear.default"), "cannot be imported"),
    (edited("model.json", lambda model: model["schema_version"].update(major=99)), "has schema 99"),
    (edited("model.json", lambda model: model["graph_module"]["graph"].update(nodes=[{}])), "is damaged"),
    (edited("model.json", lambda model: model["graph_module"]["graph"]["tensor_values"].clear()), "is damaged"),
    (edited("model.json", lambda model: model.clear()), "is damaged"),
    (edited("model.json", lambda model: _node(model)["inputs"][0].update(arg={"as_graph": {}})), "of the kind as_graph"),
    (edited("model.json", lambda model: _node(model)["inputs"][0].update(arg={"as_tensor": {"name": "later"}})), "is damaged"),
    (replaced("model.json", b"[" * 100_000), "is damaged"),
    (edited("model_weights_config.json", lambda model: model["config"]["fc.weight"].update(use_pickle=True)), "is a pickle"),
    *((without(end), ".") for end in ("models/model.json", "model_weights_config.json", "weight_0")),
    (_meta(sizes=_sizes(1 << 40, 3)), "."),
    (_meta(sizes=_sizes(-4, 3)), "."),
    (_meta(sizes=_sizes(1 << 40, 3), strides=_sizes(0, 0)), "."),
    (_meta(strides=_sizes(1 << 40, 1)), "."),
    (_meta(strides=_sizes(3)), "."),
    (_meta(storage_offset={"as_int": 1 << 40}), "."),
    (_meta(storage_offset={"as_int": -1}), "."),
    (_meta(dtype=99), "."),
    (_meta(dtype=10), "."),
]


@pytest.mark.parametrize("change, message", DESCRIPTIONS, ids=range(len(DESCRIPTIONS)))
def test_wrong_description_is_refused(exported: Path, change: Change, message: str, tmp_path: Path) -> None:
    assert_refused(changed(exported, tmp_path, change), message)


def test_expressions_of_a_description_are_not_evaluated(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.export.load would evaluate them as Python."""
    monkeypatch.chdir(tmp_path)

    def edit(model: Any) -> None:
        for value in model["graph_module"]["graph"]["tensor_values"].values():
            for size in value["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = "__import__('os').mkdir('executed')"

    read(changed(exported, tmp_path, edited("model.json", edit)))
    assert not (tmp_path / "executed").exists()


# TorchScript


CODE: list[tuple[str, str]] = [
    ("    return torch.tanh(", "is damaged"),
    ("    y = [" + "1," * 1_100_000 + "]\n    return x", "has .* bytes, and the limit is"),
    ("    return open('executed')", "calls open, which cannot be imported"),
    ("    return (lambda: x)()", "cannot|is no function|not read"),
    ("    return ''.__class__.__mro__", "reads __class__ of a value that has no names"),
    ("    import os\n    return x", "a statement of the kind Import"),
    ("    torch.save(x, 'executed')\n    return x", "has no operator save|cannot be imported"),
    ("    ops.aten.from_file('/etc/passwd', True, 5)\n    return x", "not computed from constants"),
    ("    torch.load('executed')\n    return x", "torch has no operator load"),
    ("    ops.image.read_file('a')\n    return x", "cannot be imported"),
    ("    self.training = True\n    return x", "changes self.training"),
    ("    while True:\n      y = 1\n    return x", "takes more than 300000 steps"),
    ("    for i in range(1000000000):\n      y = 1\n    return x", "list of|takes more than"),
    ("    return self.forward(x)", "more than 40 calls within each other"),
    ("    y = [1]\n    for i in range(100):\n      y = torch.add(y, y)\n    return x", "a list is too long"),
    ("    y = [1]\n    for i in range(90):\n      y = [y, y]\n    return torch.cat(y, 2)", "takes more than"),
    ("    y = [1]\n    z = torch.append(y, y)\n    return y", "takes more than|is damaged|does not depend"),
    ("    y = torch.mul([1], 1000000000)\n    return x", "a list is too long"),
    ("    y = 3\n    for i in range(100):\n      y = torch.mul(y, y)\n    return x", "a number is too large"),
    ("    y = torch.mod('%999999999d', 1)\n    return x", "texts have no arithmetic"),
    ("    y = torch.format('{:999999999}', 1)\n    return x", "the output is the input"),
    ("    y = torch.zeros([1099511627776], dtype=6)\n    return torch.add(x, y)", "and the limit is"),
    ("    y = torch.arange(1099511627776)\n    return torch.add(x, y)", "and the limit is"),
    ("    y = torch.repeat(torch.ones([8], dtype=6), [1073741824])\n    return torch.add(x, y)", "and the limit is"),
    (
        "    y = torch.constant_pad_nd(torch.ones([8], dtype=6), [0, 1099511627776], 0)\n    return torch.add(x, y)",
        "the limit is",
    ),
    ("    y = torch.expand(torch.ones([1], dtype=6), [1099511627776])\n    return torch.add(x, y)", "and the limit is"),
    ("    y = torch.eye(1048576)\n    return torch.add(x, y)", "and the limit is"),
    ("    y = x\n    for i in range(60):\n      y = torch.cat([y, y], 2)\n    return y", "columns, and the limit is"),
    (f"    return {'(' * 150}x{')' * 150}", "the output is the input|damaged"),
    (f"    return {'-' * 5000}x", "is damaged|not read"),
    ("    return missing", "does not depend|no function|damaged"),
    ("    return CONSTANTS.c5", "is damaged"),
    ("    return x\n    raise ValueError()", "the output is the input"),
    ("    ops.prim.RaiseException('stop')\n    return x", "fails: stop"),
]


@pytest.mark.parametrize("body, message", CODE, ids=range(len(CODE)))
def test_hostile_code_is_refused(traced: Path, body: str, message: str, tmp_path: Path) -> None:
    assert_refused(changed(traced, tmp_path, with_code(body)), message)


PROTO, STOP = b"\x80\x02", b"."
PICKLES = {
    "a function of os": b"cos\nmkdir\n(X\x08\x00\x00\x00executedtR",
    "a class of Python": b"cbuiltins\nlist\n)\x81",
    "builtins.eval": b"c__builtin__\neval\n(X\x01\x00\x00\x001tR",
    "no module": b"]",
    "too many instructions": b"]" * 300_000,
    "an instruction of old pickles": b"(I1\nS'a'\nd",
    "an instance": b"(i__main__\nA\n",
    "an extension": b"\x82\x01",
    "too few values": b"tR",
    "a missing memo": b"h\x05",
    "lists that double": b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(90)),
    "a list within itself": b"]q\x00h\x00a",
    "frames": b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
}


@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES)
def test_hostile_pickle_is_refused(traced: Path, content: bytes, tmp_path: Path) -> None:
    assert_refused(changed(traced, tmp_path, replaced("data.pkl", PROTO + content + STOP)))


@pytest.mark.parametrize("end", ["data.pkl", ".py", "data/0"])
def test_missing_member_of_a_script_is_refused(traced: Path, end: str, tmp_path: Path) -> None:
    assert_refused(changed(traced, tmp_path, without(end)))
