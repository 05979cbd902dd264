"""Reads the pickles within TorchScript archives: modules, tensors and plain values. Calls nothing that a pickle names."""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from service.importers.draft import UNFIT, ImportRefused, refusing
from service.importers.torch_archive.archive import Archive

CODE = "__torch__"
MOST_INSTRUCTIONS = 1 << 18
STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
LISTS = ("build_intlist", "build_tensorlist", "build_doublelist", "build_boollist")
CONSTANTS: dict[str, Any] = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
}
NEW: dict[str, Callable[[], Any]] = {"EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_LIST": list}
NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
MARK = object()


@dataclass(frozen=True, slots=True)
class Global:
    """A name in a pickle, of a class or a function."""

    name: str


@dataclass(slots=True, eq=False)
class ArchiveModule:
    """A module of a TorchScript archive. type: the name of its class."""

    type: str
    attributes: dict[str, Any] = field(default_factory=dict)


class Unpickler:
    """Interprets the few instructions that torch writes. folder: of the archive, with the numbers of the tensors."""

    def __init__(self, archive: Archive, folder: str) -> None:
        self._archive = archive
        self._folder = folder
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self, name: str) -> Any:
        """Return the value in a member; raises ImportRefused for anything but modules, tensors and plain values."""
        with refusing((*UNFIT, AttributeError), f"{name} of the archive is damaged", "save it again"):
            for number, (instruction, argument, _) in enumerate(pickletools.genops(self._archive.read(name))):
                if number > MOST_INSTRUCTIONS:
                    raise ImportRefused(f"{name} of the archive has more than {MOST_INSTRUCTIONS} instructions")
                if instruction.name == "STOP":
                    return self._stack.pop()
                self._step(instruction.name, argument)
        raise ImportRefused(f"{name} of the archive is incomplete: save it again")

    def _step(self, instruction: str, argument: Any) -> None:
        stack = self._stack
        if instruction in NUMBERS:
            stack.append(argument)
        elif instruction in CONSTANTS:
            stack.append(CONSTANTS[instruction])
        elif instruction in NEW:
            stack.append(NEW[instruction]())
        elif instruction == "MARK":
            stack.append(MARK)
        elif instruction == "GLOBAL":
            stack.append(Global(str(argument).replace(" ", ".")))
        elif instruction in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif instruction in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif instruction.startswith("TUPLE"):
            count = instruction.removeprefix("TUPLE")
            stack.append(tuple(self._taken(int(count)) if count else self._marked()))
        elif instruction != "PROTO":
            self._build(instruction)

    def _build(self, instruction: str) -> None:
        """Run an instruction that puts values together."""
        stack = self._stack
        if instruction == "APPENDS":
            items = self._marked()
            stack[-1].extend(items)
        elif instruction == "APPEND":
            item = stack.pop()
            stack[-1].append(item)
        elif instruction == "SETITEMS":
            items = self._marked()
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif instruction == "SETITEM":
            name, value = self._taken(2)
            stack[-1][name] = value
        elif instruction == "NEWOBJ":
            made, _ = self._taken(2)
            stack.append(_module(made))
        elif instruction == "BUILD":
            attributes = stack.pop()
            if not isinstance(attributes, dict):
                raise ImportRefused("a module of the archive has a __setstate__ of its own, which is code, and is not run")
            stack[-1].attributes.update(attributes)
        elif instruction == "BINPERSID":
            stack.append(Storage(*stack.pop()))
        elif instruction == "REDUCE":
            made, arguments = self._taken(2)
            stack.append(self._call(made, arguments))
        else:
            raise ImportRefused(f"a pickle of the archive has the instruction {instruction}, which TorchScript does not write")

    def _call(self, made: Any, arguments: tuple[Any, ...]) -> Any:
        name = made.name if isinstance(made, Global) else ""
        if name == "torch._utils._rebuild_tensor_v2":
            storage, offset, shape, strides = arguments[:4]
            return self._tensor(storage, offset, shape, strides)
        if name == "collections.OrderedDict":
            return {}
        if name.startswith("torch.jit._pickle.") and name.rpartition(".")[2] in (*LISTS, "restore_type_tag"):
            return arguments[0]
        raise ImportRefused(f"a pickle of the archive calls {name or made!r}, which is not read")

    def _tensor(self, storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        dtype = STORAGES.get(storage.kind.name.removeprefix("torch."))
        if dtype is None or storage.tag != "storage":
            raise ImportRefused(f"the archive has a tensor in {storage.kind.name}: save it with weights in float32")
        return self._archive.tensor(f"{self._folder}/{storage.key}", dtype, shape, strides, offset)

    def _taken(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ImportRefused("a pickle of the archive is damaged: save it again")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return taken

    def _marked(self) -> list[Any]:
        """Remove and return the values after the last mark."""
        taken: list[Any] = []
        while (value := self._stack.pop()) is not MARK:
            taken.append(value)
        return taken[::-1]


@dataclass(frozen=True, slots=True)
class Storage:
    """The numbers of tensors. kind: names their type; key: of a member of the archive."""

    tag: str
    kind: Global
    key: str
    device: str
    count: int


def _module(made: Any) -> ArchiveModule:
    if not isinstance(made, Global) or not made.name.startswith(f"{CODE}."):
        raise ImportRefused(
            f"a pickle of the archive makes {made.name if isinstance(made, Global) else made!r}, which is not read"
        )
    return ArchiveModule(made.name)
