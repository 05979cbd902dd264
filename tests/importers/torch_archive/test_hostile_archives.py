"""Descriptions, code and pickles in archives of torch that are made to harm: nothing runs, and each is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from service.importers.torch_archive import read
from tests.importers.hostile import Change, assert_refused, changed


def member(members: dict[str, bytes], end: str) -> str:
    return next(name for name in members if name.endswith(end))


def without(end: str) -> Change:
    return lambda members: members.pop(member(members, end))


def replaced(end: str, content: bytes) -> Change:
    return lambda members: members.update({member(members, end): content})


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


def _node(description: Any) -> Any:
    return description["graph_module"]["graph"]["nodes"][0]


def _target(name: str) -> Change:
    return edited("model.json", lambda model: _node(model).update(target=name))


def _sizes(*sizes: int) -> list[dict[str, int]]:
    return [{"as_int": size} for size in sizes]


def _with_meta(wrong: Any, model: Any) -> None:
    model["config"]["fc.weight"]["tensor_meta"].update(wrong)


DESCRIPTIONS: list[tuple[Change, str]] = [
    (_target("os.system"), "calls os.system, which cannot be imported"),
    (_target("torch.ops.aten.from_file.default"), "has no operator from_file|linear"),
    (_target("torch.ops.aten.nonsense.default"), "torch has no operator nonsense"),
    (_target("torch.ops.mine.linear.default"), "cannot be imported"),
    *(
        (edited("model.json", edit), message)
        for edit, message in (
            (lambda model: model["schema_version"].update(major=99), "has schema 99"),
            (lambda model: model["graph_module"]["graph"].update(nodes=[{}]), "is damaged"),
            (lambda model: model["graph_module"]["graph"]["tensor_values"].clear(), "is damaged"),
            (dict.clear, "is damaged"),
            (lambda model: _node(model)["inputs"][0].update(arg={"as_graph": {}}), "of the kind as_graph"),
            (lambda model: _node(model)["inputs"][0].update(arg={"as_tensor": {"name": "later"}}), "is damaged"),
        )
    ),
    (replaced("model.json", b"[" * 100_000), "is damaged"),
    (edited("model_weights_config.json", lambda model: model["config"]["fc.weight"].update(use_pickle=True)), "is a pickle"),
    *((without(end), ".") for end in ("models/model.json", "model_weights_config.json", "weight_0")),
    *(
        (
            edited("model_weights_config.json", partial(_with_meta, wrong)),
            ".",
        )
        for wrong in (
            *({"sizes": _sizes(1 << 40, 3)}, {"sizes": _sizes(-4, 3)}, {"sizes": _sizes(1 << 40, 3), "strides": _sizes(0, 0)}),
            *({"strides": _sizes(1 << 40, 1)}, {"strides": _sizes(3)}, {"dtype": 99}, {"dtype": 10}),
            *({"storage_offset": {"as_int": value}} for value in (1 << 40, -1)),
        )
    ),
]


@pytest.mark.parametrize("change, message", DESCRIPTIONS, ids=range(len(DESCRIPTIONS)))
def test_wrong_description_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    assert_refused(changed(tmp_path, "model.pt2", change), message)


def test_expressions_of_a_description_are_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export.load would evaluate them as Python."""
    monkeypatch.chdir(tmp_path)

    def edit(model: Any) -> None:
        for value in model["graph_module"]["graph"]["tensor_values"].values():
            for size in value["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = "__import__('os').mkdir('executed')"

    read(changed(tmp_path, "model.pt2", edited("model.json", edit)))
    assert not (tmp_path / "executed").exists()


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
    *(
        (f"    return torch.add(x, {bomb})", "the limit is")
        for bomb in (
            *("torch.zeros([1099511627776], dtype=6)", "torch.arange(1099511627776)", "torch.eye(1048576)"),
            "torch.repeat(torch.ones([8], dtype=6), [1073741824])",
            "torch.constant_pad_nd(torch.ones([8], dtype=6), [0, 1099511627776], 0)",
            "torch.expand(torch.ones([1], dtype=6), [1099511627776])",
        )
    ),
    ("    y = x\n    for i in range(60):\n      y = torch.cat([y, y], 2)\n    return y", "columns, and the limit is"),
    (f"    return {'(' * 150}x{')' * 150}", "the output is the input|damaged"),
    (f"    return {'-' * 5000}x", "is damaged|not read"),
    ("    return missing", "does not depend|no function|damaged"),
    ("    return CONSTANTS.c5", "is damaged"),
    ("    return x\n    raise ValueError()", "the output is the input"),
    ("    ops.prim.RaiseException('stop')\n    return x", "fails: stop"),
]


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


SCRIPTS: list[tuple[Change, str]] = [
    *((with_code(body), message) for body, message in CODE),
    *((replaced("data.pkl", b"\x80\x02" + content + b"."), ".") for content in PICKLES.values()),
    *((without(end), ".") for end in ("data.pkl", ".py", "data/0")),
]


@pytest.mark.parametrize("change, message", SCRIPTS, ids=[*range(len(CODE)), *PICKLES, *"pcd"])
def test_hostile_script_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    assert_refused(changed(tmp_path, "traced.pt", change), message)
