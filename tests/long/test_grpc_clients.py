"""gRPC calls by independent implementations: nghttp2, and gRPC for C++ in Triton's load generator, which `make test-all` installs.

Debian's package nghttp2-client provides the other programs.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.scenarios import perf_analyzer
from service.frontend.oip import protobuf
from tests.serving import Server, check_unharmed, eventually, serving

ROOT = Path(__file__).resolve().parents[2]
PATH = "/inference.GRPCInferenceService/ModelInfer"
INFER = protobuf.METHODS["ModelInfer"]
TEXT = b"Who wrote Hamlet ?"
ANALYZER_CALLS = 500
"""The calls of one run of Triton's load generator."""
HEADERS = ("-Hte: trailers", "-Hcontent-type: application/grpc")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(ROOT / "models", tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the body of a ModelInfer call."""
    message = INFER.request_type(model_name="question-type", raw_input_contents=[struct.pack("<I", len(TEXT)) + TEXT])
    message.inputs.add(name="text", datatype="BYTES", shape=[1])
    data = message.SerializeToString()
    file = tmp_path_factory.mktemp("body") / "request"
    file.write_bytes(struct.pack(">BI", 0, len(data)) + data)
    return file


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: install Debian's package nghttp2-client")
    return found


def test_h2load_gets_every_answer(served: Server, body: Path) -> None:
    """Calls on many streams, with a window smaller than the reply."""
    calls = 10_000
    command = [program("h2load"), f"-n{calls}", "-c4", "-m32", "-w", "7", "-W", "30", f"-d{body}", *HEADERS]
    said = subprocess.run(
        [*command, f"http://{served.grpc}{PATH}"], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert re.search(rf"{calls} succeeded, 0 failed, 0 errored, 0 timeout", said), said
    check_unharmed(served)


def test_cpp_client(served: Server, tmp_path: Path) -> None:
    """Triton's load generator calls with gRPC for C++: questions, and sessions in single calls and on streams."""
    if not perf_analyzer.BINARY.is_file():
        pytest.skip(f"{perf_analyzer.BINARY} is missing: `make test-all` installs it")
    cases = [
        case
        for case in perf_analyzer.cases(tmp_path, served.address, served.grpc, callers=[8])
        if case.protocol != perf_analyzer.REST
    ]
    before = served.metric("seqserve_requests_total", outcome="ok")
    for case in cases:
        # A fixed number of calls: a busy machine takes longer, and no figure has to be stable.
        figures = perf_analyzer.measure(case, tmp_path, "--request-count", str(ANALYZER_CALLS))
        assert figures is not None, f"{case.name} failed"
    eventually(lambda: served.metric("seqserve_requests_total", outcome="ok") - before >= len(cases) * ANALYZER_CALLS)
    check_unharmed(served)
