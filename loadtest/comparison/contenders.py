"""The compared servers: how each is started, with its best settings, and its endpoints. Each request has one text.

Triton has a separate virtual environment, which `make loadtest SCENARIO=serving` creates.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loadtest import oip_requests, servers
from loadtest.baselines.classifier import CONSTANT, MODEL_VARIABLE
from loadtest.servers import ServerProcess
from loadtest.target import Target

ENVIRONMENT = servers.ROOT / ".venv-baselines" / "triton"
"""The virtual environment of Triton."""
BASELINES = servers.ROOT / "loadtest" / "baselines"
SERVED = "classifier"
"""Name of the model in Triton."""
MAX_BATCH = 32
READY = "/v2/health/ready"
SEQSERVE, TRITON = "seqserve", "Triton"


class Endpoint(NamedTuple):
    """One endpoint of a server.

    transport, reader: as in `generator.job.Job`. write: returns the bytes of a request from the name of the model and a text. model: its
    name in requests, if not the model's own.
    """

    name: str
    transport: str
    reader: str
    write: Callable[[str, str], bytes]
    model: str | None = None


def infer(model: str, text: str) -> bytes:
    return Target("127.0.0.1", 0, "/infer").request(json.dumps({"model": model, "inputs": [text]}).encode())


INFER = Endpoint("/infer", "http", "infer", infer)
OIP_BINARY = Endpoint("OIP binary", "http", "last floats", oip_requests.binary_text)
OIP_GRPC = Endpoint("gRPC", "grpc", "last floats", oip_requests.text_message)


class Launch(NamedTuple):
    """A command and its environment."""

    command: Sequence[str]
    environment: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Server:
    """One compared server.

    launch: returns the command from an empty folder for its files, and its ports for HTTP and gRPC. constant: whether it is also measured
    without a model, when it returns a constant.
    """

    name: str
    launch: Callable[[Path, int, int], Launch]
    endpoints: tuple[Endpoint, ...]
    constant: bool = False

    def why_skipped(self) -> str | None:
        """Return why the server cannot run here."""
        if self.name != TRITON or (ENVIRONMENT / "installed").is_file():
            return None
        return f"not installed by `make loadtest SCENARIO=serving`: read {ENVIRONMENT / 'install.log'}"

    @contextmanager
    def running(self, models: Path, model: str | None, scratch: Path) -> Iterator[ServerProcess]:
        """Run the server with a model, or without to get its constant answer. `scratch` gets its files and its log."""
        port, grpc_port = servers.free_ports(2)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        launch = self.launch(scratch, port, grpc_port)
        environment = {"PYTHONPATH": servers.python_path(), "TOKENIZERS_PARALLELISM": "false", "SEQSERVE_MODELS": str(models)}
        if model is not None:
            environment[MODEL_VARIABLE] = str((models / model / "1").resolve())
        url, grpc = f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}"
        environment |= launch.environment
        with servers.started(launch.command, environment, url, grpc, READY, scratch / "server.log") as server:
            yield server


def _seqserve(scratch: Path, port: int, grpc_port: int) -> Launch:
    flags = ("--port", str(port), "--grpc-port", str(grpc_port), "--device", "cpu")
    return Launch((sys.executable, *servers.SEQSERVE, *flags))


def _triton(scratch: Path, port: int, grpc_port: int) -> Launch:
    """Write a model repository. Batches form without a delay, which measured best at every number of callers."""
    [packages] = (ENVIRONMENT / "lib").glob("python*/site-packages")
    program = packages / "pytriton" / "tritonserver"
    version = packages.parent.name.removeprefix("python")
    repository = scratch / "repository"
    (repository / SERVED / "1").mkdir(parents=True)
    shutil.copy(BASELINES / "triton_model.py", repository / SERVED / "1" / "model.py")
    (repository / SERVED / "config.pbtxt").write_text(_TRITON_MODEL)
    flags = {"http-port": port, "grpc-port": grpc_port, "model-repository": repository}
    flags |= {"backend-directory": _triton_backends(program, version, scratch), "allow-metrics": "false", "log-info": "false"}
    environment = {
        "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{servers.python_path()}:{packages}",
        "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
    }
    command = (str(program / "bin" / "tritonserver"), *(f"--{name}={value}" for name, value in flags.items()))
    return Launch(command, environment)


def _triton_backends(program: Path, version: str, scratch: Path) -> Path:
    """Return a folder with the Python backend and its interpreter for this version of Python, which must be in one folder."""
    backend = scratch / "backends" / "python"
    backend.mkdir(parents=True)
    interpreter = program / "python_backend_stubs" / version / "triton_python_backend_stub"
    for file in (*(program / "backends" / "python").glob("*triton_python*"), interpreter):
        (backend / file.name).symlink_to(file)
    return backend.parent


_TRITON_MODEL = f"""
name: "{SERVED}"
backend: "python"
max_batch_size: {MAX_BATCH}
input [{{ name: "text", data_type: TYPE_STRING, dims: [1] }}]
output [{{ name: "scores", data_type: TYPE_FP32, dims: [{len(CONSTANT)}] }}]
instance_group [{{ kind: KIND_CPU, count: 1 }}]
dynamic_batching {{ max_queue_delay_microseconds: 0 }}
"""


SERVERS = (
    Server(SEQSERVE, _seqserve, (INFER, OIP_BINARY, OIP_GRPC)),
    Server(TRITON, _triton, (OIP_BINARY._replace(model=SERVED), OIP_GRPC._replace(model=SERVED)), constant=True),
)
