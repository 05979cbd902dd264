"""gRPC calls by independent implementations: nghttp2 (Debian: nghttp2-client) and gRPC for JavaScript (npm)."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.frontend.oip import protobuf
from tests.serving import Server, check_unharmed, serving

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "service" / "frontend" / "oip" / "inference.proto"
PATH = "/inference.GRPCInferenceService/ModelInfer"
HEADERS = ("-Hte: trailers", "-Hcontent-type: application/grpc")
SCRIPT = Path(__file__).with_name("grpc_client.js")
PACKAGES = ("@grpc/grpc-js@1.14", "@grpc/proto-loader@0.8")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(ROOT / "models", tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the body of a ModelInfer call."""
    question = b"Who wrote Hamlet ?"
    message = protobuf.METHODS["ModelInfer"].request_type(model_name="question-type")
    message.inputs.add(name="text", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(struct.pack("<I", len(question)) + question)
    data = message.SerializeToString()
    file = tmp_path_factory.mktemp("body") / "request"
    file.write_bytes(struct.pack(">BI", 0, len(data)) + data)
    return file


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_nghttp_gets_an_answer(served: Server, body: Path) -> None:
    command = [program("nghttp"), "-v", f"-d{body}", *HEADERS, f"http://{served.grpc}{PATH}"]
    said = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
    assert b"grpc-status: 0" in said and b"HUM" in said


@pytest.mark.parametrize("window_bits", ["7", "16", "30"])
def test_h2load_gets_every_answer(served: Server, body: Path, window_bits: str) -> None:
    """Calls on many streams, also with a window smaller than the reply."""
    calls = 10_000
    command = [program("h2load"), f"-n{calls}", "-c4", "-m32", "-w", window_bits, "-W", "30", f"-d{body}", *HEADERS]
    said = subprocess.run(
        [*command, f"http://{served.grpc}{PATH}"], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert re.search(rf"{calls} succeeded, 0 failed, 0 errored, 0 timeout", said), said
    check_unharmed(served)


def test_javascript_client(served: Server, tmp_path: Path) -> None:
    node, npm = program("node"), program("npm")
    installing = subprocess.run([npm, "install", "--ignore-scripts", *PACKAGES], cwd=tmp_path, capture_output=True, text=True)
    if installing.returncode:
        pytest.skip(f"npm cannot install the client: {installing.stderr[-200:]}")
    shutil.copy(SCRIPT, tmp_path)
    said = subprocess.run(
        [node, SCRIPT.name, served.grpc, str(PROTO)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert said.stdout.splitlines() == [
        "label HUM",
        "500 answers",
        "code 5 unknown_model",
        "code 8 too_large",
        "50 replies on a stream",
        "cancelled 1",
        "ready true",
    ], said.stderr
    check_unharmed(served)
