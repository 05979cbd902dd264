"""`python -m tests.mutants`: plants small faults in the parts of mutants.toml, and prints how many of them the tests find.

Cosmic Ray has the faults, one at a time: another operator, number, condition or loop. Faults are planted in functions; annotations and
module constants are left as they are. The same seed takes the same places as long as the code is the same. A later call continues with the
results of an earlier call, as long as no file of the project has changed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path, PurePath
from queue import SimpleQueue
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from parso.tree import search_ancestor

from service.flags import above_zero

ROOT = Path(__file__).resolve().parent.parent
PARTS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
STAGES = ("not server and not slow and not gpu", "server or slow")
"""The tests of a part in the order in which they run: most faults are found before a server starts."""
HANGS = 120.0
"""A test that takes more seconds than this has found a fault: one that ends no loop, or no wait."""


@dataclass(frozen=True)
class Mutant:
    """A fault in a part. occurrence: of the operator in the file."""

    part: str
    file: str
    line: int
    operator: str
    occurrence: int

    def code(self) -> str | None:
        """Return the file with the fault, or None if the fault changes no statement that runs."""
        source = (ROOT / self.file).read_text()
        try:
            mutated = mutate_code(source, get_operator(self.operator)(), self.occurrence)
            return None if mutated is None or _running(mutated) == _running(source) else str(mutated)
        except SyntaxError:
            return None

    def difference(self) -> str:
        lines = difflib.unified_diff(
            (ROOT / self.file).read_text().splitlines(), (self.code() or "").splitlines(), n=0, lineterm=""
        )
        return "\n".join(f"    {line}" for line in list(lines)[3:])


def main() -> int:
    """Return 1 if the tests miss too many faults, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=above_zero(int), default=35, help="faults in each part")
    parser.add_argument("--jobs", type=above_zero(int), default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="run only tests that start no server")
    parser.add_argument("--least", type=float, default=90.0, help="percentage of the faults that the tests must find")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "mutants.jsonl", help="results that a later call continues"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"no part {', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    mutants = [mutant for part in options.parts for mutant in draw(part, options.each, options.seed)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    project = digest()
    known = read(options.out, project)
    with (
        options.out.open("a") as out,
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(options.jobs) as pool,
        ExitStack() as at_exit,
    ):
        at_exit.callback(pool.shutdown, wait=False, cancel_futures=True)  # after an interrupt, only the running tests end
        trees = SimpleQueue[Path]()
        for tree in pool.map(copy, (Path(scratch) / str(number) for number in range(options.jobs))):
            trees.put(tree)
        for stage in STAGES[: 1 if options.quick else None]:
            left = [mutant for mutant in mutants if (mutant, stage) not in known and not is_found(mutant, known)]
            tests = list(dict.fromkeys(test for mutant in left for test in PARTS[mutant.part]["tests"]))
            if left and (output := run(Path(scratch) / "0", tests, stage, "-n", str(options.jobs), "--dist", "loadfile")):
                raise SystemExit(f"the tests fail without a fault:\n{output}")
            running = {pool.submit(passes, mutant, stage, trees): mutant for mutant in left}
            for done in as_completed(running):
                known[running[done], stage] = not done.result()
                print(json.dumps([project, *astuple(running[done]), stage, not done.result()]), file=out, flush=True)
    missed = [mutant for mutant in mutants if not is_found(mutant, known)]
    for mutant in missed:
        print(f"missed: {mutant.file}:{mutant.line}\n{mutant.difference()}")
    return report(mutants, missed, options.least)


def read(file: Path, project: str) -> dict[tuple[Mutant, str], bool]:
    """Return what earlier calls wrote to a file about the same project: by fault and stage, whether the tests found the fault."""
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    return {(Mutant(*values), stage): found for written, *values, stage, found in lines if written == project}


def is_found(mutant: Mutant, known: dict[tuple[Mutant, str], bool]) -> bool:
    return any(known.get((mutant, stage), False) for stage in STAGES)


def draw(part: str, count: int, seed: int) -> Iterator[Mutant]:
    """Yield up to `count` faults of a part, each at another place."""
    files = sorted(
        {
            file
            for folder, names in PARTS[part]["files"].items()
            for name in names
            for file in (ROOT / folder).glob(f"{name}.py")
            if file.stem != "__init__"
        }
    )
    places: dict[tuple[str, int, int], list[Mutant]] = defaultdict(list)
    for file in files:
        name = str(file.relative_to(ROOT))
        for operator, occurrence, line, column in occurrences(file.read_text()):
            places[name, line, column].append(Mutant(part, name, line, operator, occurrence))
    chance, drawn = random.Random(f"{seed} {part}"), 0
    for place in chance.sample(sorted(places), len(places)):
        mutant = chance.choice(places[place])
        if drawn < count and mutant.code() is not None:
            drawn += 1
            yield mutant


def occurrences(source: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield each operator with its occurrences in functions of a file, and their lines and columns."""
    nodes = list(ast_nodes(get_ast(source)))
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():
            continue
        found = ((node, start) for node in nodes for start, _ in operator().mutation_positions(node))
        for occurrence, (node, start) in enumerate(found):
            if search_ancestor(node, "funcdef") is not None:
                yield name, occurrence, *start


def project_files() -> list[str]:
    """Return the files of the project that git tracks, or may track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    return sorted(name for name in set(listed) if (ROOT / name).is_file())


def digest() -> str:
    """Return a text that differs for other contents of the project."""
    contents = [[name, sha256((ROOT / name).read_bytes()).hexdigest()] for name in project_files()]
    return sha256(json.dumps(contents).encode()).hexdigest()[:16]


def copy(tree: Path) -> Path:
    """Copy the files of the project, with links to what `make` installed, and compile the kernels."""
    for name in project_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    for folder in ROOT.glob(".venv*"):
        (tree / folder.name).symlink_to(folder)
    python(tree, "kernels.cpu")
    return tree


def tests_of(part: str, file: str) -> tuple[list[str], list[str]]:
    """Return the files with tests of a part: those that are named after the faulty file or import it, and the others."""
    module = PurePath(file).with_suffix("")
    package = f"from {'.'.join(module.parts[:-1])} import"
    near: list[str] = []
    far: list[str] = []
    for test in dict.fromkeys(test for name in PARTS[part]["tests"] for test in _files(ROOT / name)):
        code = test.read_text()
        is_near = (
            test.stem == f"test_{module.name}" or ".".join(module.parts) in code or (package in code and module.name in code)
        )
        (near if is_near else far).append(str(test.relative_to(ROOT)))
    return near, far


def _files(place: Path) -> list[Path]:
    return sorted(place.rglob("test_*.py")) if place.is_dir() else [place]


def passes(mutant: Mutant, stage: str, trees: SimpleQueue[Path]) -> bool:
    """Return whether the tests of a stage pass in a copy of the project with a fault. Most faults fail one of the first tests."""
    tree, code = trees.get(), mutant.code()
    assert code is not None
    try:
        (tree / mutant.file).write_text(code)
        return not python(tree, "kernels.cpu") and not any(
            run(tree, tests, stage) for tests in tests_of(mutant.part, mutant.file) if tests
        )
    finally:
        shutil.copy2(ROOT / mutant.file, tree / mutant.file)
        trees.put(tree)


def run(tree: Path, tests: list[str], stage: str, *more: str) -> str:
    """Run tests until one fails. Return the output of the failed test."""
    limit = ["-o", f"faulthandler_timeout={HANGS}", "-o", "faulthandler_exit_on_timeout=true"]
    options = ["-x", "-p", "no:cacheprovider", "--hypothesis-profile", "first failure", "-m", stage, *limit, *more]
    return python(tree, "pytest", *options, *tests)


def python(tree: Path, *arguments: str) -> str:
    """Run a module in a copy of the project, which has its own compiled kernels. Return its output if it fails."""
    path = f"{tree}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"HOME": str(tree), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return "" if done.returncode in (0, 5) else done.stdout + done.stderr  # 5: no test was selected


def report(mutants: list[Mutant], missed: list[Mutant], least: float) -> int:
    """Print the share of found faults by part. Returns 1 if it is too small in all parts together, otherwise 0."""
    drawn, lost = Counter(mutant.part for mutant in mutants), Counter(mutant.part for mutant in missed)
    print(f"{'part':<14} {'faults':>7} {'found':>6} {'%':>6}")
    for part, count, misses in [*((part, drawn[part], lost[part]) for part in drawn), ("all", len(mutants), len(missed))]:
        print(f"{part:<14} {count:>7} {count - misses:>6} {100 * (count - misses) / count:>6.1f}")
    return 1 if 100 * (len(mutants) - len(missed)) < least * len(mutants) else 0


def _running(source: str) -> str:
    """Return the syntax tree of a file without its annotations."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if hasattr(node, name):
                setattr(node, name, None)
    return ast.dump(tree)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
