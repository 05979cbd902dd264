"""`python -m loadtest.generator JOB RESULT`: run the job in one file, and write its result to the other."""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path

import msgspec
import uvloop

from loadtest.generator.job import Job
from loadtest.generator.loops import run


def main() -> None:
    source, destination = map(Path, sys.argv[1:])
    job = msgspec.msgpack.decode(source.read_bytes(), type=Job)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    gc.disable()  # a collection would delay answers, and a job leaves few cycles behind
    try:
        destination.write_bytes(msgspec.msgpack.encode(uvloop.run(run(job))))
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
