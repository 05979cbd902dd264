"""The lock files of the image name every package that the service needs, in the tested version and with its hashes."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from loadtest.servers import ROOT

APART = {"torch"}
"""Its files depend on the index that it comes from."""
ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)
COMMENT = re.compile(r"^#.*$", re.MULTILINE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(name: str) -> dict[str, str]:
    """Return the versions in a lock file. Every line of it belongs to an entry with at least one hash."""
    text = (ROOT / "deploy" / "requirements" / f"{name}.txt").read_text()
    assert not ENTRY.sub("", COMMENT.sub("", text)).strip(), "each package has hashes, and nothing else is in the file"
    return {canonicalize_name(package): version for package, version, _ in ENTRY.findall(text)}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize(("name", "extras"), [("cpu", ["redis", "trace"]), ("gpu", ["gpu", "redis", "trace"])])
def test_lock_has_what_the_project_needs(name: str, extras: list[str]) -> None:
    """If this fails after a change of dependencies, run `make lock`."""
    versions = locked(name)
    for line in [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]:
        needed = Requirement(line)
        if needed.name not in APART:
            assert versions[canonicalize_name(needed.name)] in needed.specifier, line
    assert not APART & versions.keys()
    assert {package: version for package, version in constraints().items() if package in versions}.items() <= versions.items()


def test_lock_has_what_the_packages_need() -> None:
    """Follows the requirements of the installed packages, including the requirements of torch, except the libraries of CUDA."""
    versions, found = locked("cpu"), set[str]()
    left = [Requirement(line).name for line in PROJECT["dependencies"]]
    while left:
        package = canonicalize_name(left.pop())
        if package in found:
            continue
        found.add(package)
        assert package in versions or package in APART or package.startswith(("nvidia-", "cuda-", "triton")), package
        try:
            left += [needed.name for needed in map(Requirement, requires(package) or ()) if _applies(needed)]
        except PackageNotFoundError:
            continue
    assert len(found) > 30


def _applies(needed: Requirement) -> bool:
    return needed.marker is None or needed.marker.evaluate({"extra": ""})


def test_gpu_lock_extends_the_other() -> None:
    assert locked("cpu").items() < locked("gpu").items()
