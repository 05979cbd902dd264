"""Compiles the libraries in C that tests load into the processes of a service before all others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def compiled(source: str, folder: Path) -> Path:
    """Return the library that is compiled from a file in this folder. Skips the test without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler is missing")
    file = Path(__file__).with_name(source)
    library = folder / file.with_suffix(".so").name
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(file), "-ldl"], check=True)
    return library
