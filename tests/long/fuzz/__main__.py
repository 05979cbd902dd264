"""`python -m tests.long.fuzz TARGET SECONDS FOLDER`: fuzz one parser, guided by the coverage of the service's code.

Starts from tests/long/fuzz/corpus/TARGET. A finding ends the run with its traceback, and its bytes are a file in FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["service", "tests.long.fuzz"]):
    from tests.long.fuzz.targets import TARGETS, checked

CORPUS = Path(__file__).with_name("corpus")
MAX_BYTES = 8192
"""Bytes of one input. Larger inputs take longer to mutate, and take no other branches."""
MAX_MEMORY_MB = 2048
MAX_WALL_SECONDS = 10
"""A parse that takes longer is a finding even if the processor is idle."""


def main() -> None:
    name, seconds, folder = sys.argv[1:]
    options = {
        "max_total_time": seconds,
        "max_len": MAX_BYTES,
        "rss_limit_mb": MAX_MEMORY_MB,
        "timeout": MAX_WALL_SECONDS,
        "artifact_prefix": f"{folder}/",
    }
    # libFuzzer writes new inputs to the first folder that it is given, and only reads the others.
    arguments = [sys.argv[0], *[f"-{option}={value}" for option, value in options.items()], folder, str(CORPUS / name)]
    atheris.Setup(arguments, checked(TARGETS[name]))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
