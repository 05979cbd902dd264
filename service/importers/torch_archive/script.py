"""Reads and interprets programs of torch.jit.save: TorchScript archives, of traced and of scripted modules.

An archive has the text of its code. It is parsed and interpreted here, statement by statement, as far as it is plain: calls of torch's
operators, of functions and of methods, and branches and loops that do not depend on the numbers of tensors. torch.jit.load would run code
of the archive that changes files.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from service.importers.draft import ImportRefused, refusing
from service.importers.torch_archive.archive import Archive
from service.importers.torch_archive.pickles import CODE, ArchiveModule, Unpickler
from service.importers.torch_archive.program import Machine, ProgramInput
from service.importers.torch_archive.scalars import SCALARS

MOST_STEPS = 300_000
"""Statements and expressions that are interpreted in all readings of the inputs together, after which an archive is refused."""
CODE_BYTES = 1 << 21
"""All code that is parsed."""
DEEPEST_CALL = 40
LARGEST_LIST = 10_000
NUMBERS = ("int", "Int", "float", "Float", "bool", "Bool", "IntImplicit", "ScalarImplicit", "item")
"""Functions that make a number of a tensor."""
NUMBER_TYPES = ("int", "float", "bool", "number")
UNPARSABLE = (MemoryError, RecursionError, SyntaxError, ValueError)
IDENTITY = ("__is__", "__isnot__")
"""Functions of values of any kind."""


class ScriptProgram:
    """The forward method of the module in an archive. steps: how many statements and expressions were interpreted."""

    def __init__(self, archive: Archive) -> None:
        self.steps = 0
        self._code_left = CODE_BYTES
        self._archive = archive
        self._files: dict[str, ast.Module] = {}
        module = Unpickler(archive, "data").read("data.pkl")
        if not isinstance(module, ArchiveModule):
            raise ImportRefused("the archive has no module: save a module with torch.jit.save")
        self._module = module
        constants = Unpickler(archive, "constants").read("constants.pkl") if "constants.pkl" in archive else ()
        self._constants = {f"c{index}": value for index, value in enumerate(constants)}
        found = {
            **_tensors(module, ""),
            **{name: value for name, value in self._constants.items() if isinstance(value, Tensor)},
        }
        self.weights: dict[str, Tensor] = found
        self._names = {id(tensor): name for name, tensor in found.items()}
        self._forward = self.method(module.type, "forward")
        parameters = self._forward.args
        required = parameters.args[1 : len(parameters.args) - len(parameters.defaults)]
        self.inputs = [ProgramInput(parameter.arg) for parameter in required]

    def run(self, machine: Machine, inputs: Mapping[str, Any]) -> Any:
        interpreter = Interpreter(self, machine)
        result = interpreter.call(self._forward, [self._module, *(inputs[one.name] for one in self.inputs)], {})
        return _first(result)

    def weight(self, machine: Machine, tensor: Tensor) -> Any:
        return machine.constant(self._names.get(id(tensor), ""), tensor)

    def constant(self, name: str) -> Any:
        return self._constants[name]

    def function(self, name: str) -> ast.FunctionDef | ast.ClassDef:
        """Return a function or a class by its full name."""
        path, _, last = name.rpartition(".")
        for node in self._file(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last:
                return node
        raise ImportRefused(f"the archive calls {name}, which is not in it: save it again")

    def method(self, type: str, name: str) -> ast.FunctionDef:
        definition = self.function(type)
        for node in definition.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        raise ImportRefused(f"{type} has no method {name}: save a module that has it")

    def final(self, type: str, name: str) -> Any:
        """Return a constant of a class, which is in its code."""
        for node in self.function(type).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name and node.value:
                return ast.literal_eval(node.value)
        raise ImportRefused(f"{type} has no attribute {name}: save it again")

    def _file(self, path: str) -> ast.Module:
        if path not in self._files:
            content = self._archive.read(f"code/{path.replace('.', '/')}.py", self._code_left)
            self._code_left -= len(content)
            with refusing(UNPARSABLE, f"the code of {path} in the archive is damaged", "save it again"):
                self._files[path] = ast.parse(content)
        return self._files[path]


@dataclass(slots=True)
class Returned(Exception):  # it leaves a function, and reports nothing
    value: Any


@dataclass(frozen=True, slots=True)
class Name:
    """A dotted name that is no variable, such as torch.linear."""

    text: str


@dataclass(slots=True)
class Interpreter:
    """Interprets functions of an archive."""

    program: ScriptProgram
    machine: Machine
    depth: int = 0
    _known: dict[int, Any] = field(default_factory=dict)

    def call(self, function: ast.FunctionDef, positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return the result of a function."""
        if self.depth >= DEEPEST_CALL:
            raise ImportRefused(f"the code of the archive has more than {DEEPEST_CALL} calls within each other")
        parameters, defaults = function.args.args, function.args.defaults
        values = {parameter.arg: value for parameter, value in zip(parameters, positional, strict=False)}
        values |= named
        for parameter, default in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True):
            values.setdefault(parameter.arg, ast.literal_eval(default))
        self.depth += 1
        try:
            self._block(function.body, values)
        except Returned as returned:
            return returned.value
        finally:
            self.depth -= 1
        return None

    def _block(self, statements: Sequence[ast.stmt], values: dict[str, Any]) -> None:
        for statement in statements:
            self._count()
            if isinstance(statement, ast.Assign):
                self._assign(statement.targets[0], self._value(statement.value, values), values)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._assign(statement.target, self._value(statement.value, values), values)
            elif isinstance(statement, ast.Expr):
                self._value(statement.value, values)
            elif isinstance(statement, ast.If):
                self._block(statement.body if self._condition(statement.test, values) else statement.orelse, values)
            elif isinstance(statement, ast.For):
                for item in self._value(statement.iter, values):
                    self._assign(statement.target, item, values)
                    self._block(statement.body, values)
            elif isinstance(statement, ast.While):
                while self._condition(statement.test, values):
                    self._block(statement.body, values)
            elif isinstance(statement, ast.Return):
                raise Returned(None if statement.value is None else self._value(statement.value, values))
            elif not isinstance(statement, ast.Pass):
                raise ImportRefused(f"the code of the archive has a statement of the kind {type(statement).__name__}")

    def _condition(self, test: ast.expr, values: dict[str, Any]) -> bool:
        value = self._value(test, values)
        if self.machine.is_tensor(value):
            raise ImportRefused(f"the code of the archive branches by the numbers of a tensor ({ast.unparse(test)[:80]})")
        return bool(value)

    def _assign(self, target: ast.expr, value: Any, values: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            values[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for each, item in zip(target.elts, value, strict=True):
                self._assign(each, item, values)
        else:
            raise ImportRefused(f"the code of the archive changes {ast.unparse(target)[:80]}, which a model does not do")

    def _value(self, node: ast.expr, values: dict[str, Any]) -> Any:
        self._count()
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return values[node.id] if node.id in values else Name(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._value(node.value, values), node.attr)
        if isinstance(node, ast.Call):
            return self._call(node, values)
        if isinstance(node, ast.List | ast.Tuple):
            items = [self._value(item, values) for item in node.elts]
            return items if isinstance(node, ast.List) else tuple(items)
        if isinstance(node, ast.Subscript):
            return self._value(node.value, values)[self._value(node.slice, values)]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._value(node.operand, values)
        raise ImportRefused(f"the code of the archive has an expression that is not read: {ast.unparse(node)[:80]}")

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Name):
            return self._constant(self.program.constant(name)) if owner.text == "CONSTANTS" else Name(f"{owner.text}.{name}")
        if isinstance(owner, ArchiveModule):
            if name in owner.attributes:
                return self._constant(owner.attributes[name])
            return self.program.final(owner.type, name)
        raise ImportRefused(f"the code of the archive reads {name} of a value that has no names")

    def _constant(self, value: Any) -> Any:
        """Return a value of the archive, with its tensors as values of the machine."""
        if isinstance(value, Tensor):
            if id(value) not in self._known:
                self._known[id(value)] = self.program.weight(self.machine, value)
            return self._known[id(value)]
        if isinstance(value, list | tuple):
            self._measure(value)
            return type(value)(map(self._constant, value))
        return value

    def _call(self, node: ast.Call, values: dict[str, Any]) -> Any:
        if isinstance(node.func, ast.Attribute):
            owner = self._value(node.func.value, values)
            if isinstance(owner, ArchiveModule):
                positional, named = self._arguments(node, values)
                return self.call(self.program.method(owner.type, node.func.attr), [owner, *positional], named)
            called = self._attribute(owner, node.func.attr)
        else:
            called = self._value(node.func, values)
        if not isinstance(called, Name):
            raise ImportRefused(f"the code of the archive calls {ast.unparse(node.func)[:80]}, which is no function")
        if called.text in ("annotate", "unchecked_cast"):
            value = self._value(node.args[1], values)
            is_number = ast.unparse(node.args[0]) in NUMBER_TYPES and self.machine.is_tensor(value)
            return self.machine.number(value) if is_number else value
        if called.text == "uninitialized":
            return None
        if called.text == "isinstance" and ast.unparse(node.args[1]) == "Tensor":
            return self.machine.is_tensor(self._value(node.args[0], values))
        if called.text == "getattr" and isinstance(node.args[1], ast.Constant):
            return self._attribute(self._value(node.args[0], values), str(node.args[1].value))
        return self._named(called.text, *self._arguments(node, values))

    def _arguments(self, node: ast.Call, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        positional = [self._value(argument, values) for argument in node.args]
        named = {str(keyword.arg): self._value(keyword.value, values) for keyword in node.keywords}
        self._measure([*positional, *named.values()])
        return positional, named

    def _named(self, name: str, positional: list[Any], named: dict[str, Any]) -> Any:
        """Call a function by its full name."""
        if name.startswith(f"{CODE}."):
            function = self.program.function(name)
            return tuple(positional) if isinstance(function, ast.ClassDef) else self.call(function, positional, named)
        space, _, short = name.rpartition(".")
        if space == "ops.prim" and short == "RaiseException":
            raise ImportRefused(f"the code of the archive fails: {positional[0]}")
        if space in ("torch", "ops.aten", "ops.prim", ""):
            of_list = bool(positional) and isinstance(positional[0], list | tuple)
            if short in SCALARS and (
                of_list or short in IDENTITY or not any(map(self._has_tensors, (*positional, *named.values())))
            ):
                return self._bounded(SCALARS[short](*positional, **named))
            if short in NUMBERS:
                return SCALARS[short](self.machine.number(positional[0]))
            if space in ("torch", "ops.aten"):
                return self._operate(short, positional, named)
            if space == "ops.prim" and short in ("dtype", "device", "layout"):
                return None
        raise ImportRefused(f"the code of the archive calls {name}, which cannot be imported")

    def _operate(self, name: str, positional: list[Any], named: dict[str, Any]) -> Any:
        if name in ("size", "sym_size"):
            sizes = self.machine.size(positional[0])
            return sizes[positional[1]] if len(positional) > 1 else sizes
        if name == "dim":
            return len(self.machine.size(positional[0]))
        if name == "numel":
            return math.prod(self.machine.size(positional[0]))
        return self.machine.operate(name, None, positional, named)

    def _has_tensors(self, value: Any) -> bool:
        return any(map(self._has_tensors, value)) if isinstance(value, list | tuple) else self.machine.is_tensor(value)

    def _bounded(self, value: Any) -> Any:
        if isinstance(value, list | tuple | str | range) and len(value) > LARGEST_LIST:
            raise ImportRefused(f"the code of the archive makes a list of {len(value)} items, and the limit is {LARGEST_LIST}")
        return value

    def _measure(self, values: Sequence[Any]) -> None:
        """Count the items of nested lists: a list that has another list twice doubles with each level."""
        waiting = [values]
        while waiting:
            for item in waiting.pop():
                self._count()
                if isinstance(item, list | tuple):
                    waiting.append(item)

    def _count(self) -> None:
        self.program.steps += 1
        if self.program.steps > MOST_STEPS:
            raise ImportRefused(
                f"the code of the archive takes more than {MOST_STEPS} steps: export the model with torch.export"
            )


def _tensors(module: ArchiveModule, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a module and of its inner modules, by name."""
    found: dict[str, Tensor] = {}
    waiting = [(prefix, module)]
    seen = set()
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for name, value in module.attributes.items():
            if isinstance(value, Tensor):
                found[f"{prefix}{name}"] = value
            elif isinstance(value, ArchiveModule):
                waiting.append((f"{prefix}{name}.", value))
    return found


def _first(result: Any) -> Any:
    """Return the first output of several, which may be within tuples."""
    for _ in range(DEEPEST_CALL):
        if not isinstance(result, list | tuple) or not result:
            break
        result = result[0]
    return result
