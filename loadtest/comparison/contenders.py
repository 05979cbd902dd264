"""The compared servers: how each is started, with its best settings, and its endpoints.

Triton has a separate virtual environment, which `make loadtest SCENARIO=serving` creates.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loadtest import servers
from loadtest.baselines.classifier import CONSTANT, MODEL_VARIABLE
from loadtest.comparison.endpoints import INFER, OIP_BINARY, OIP_GRPC, PREDICT, Endpoint
from loadtest.servers import ServerProcess

ENVIRONMENTS = servers.ROOT / ".venv-baselines"
BASELINES = servers.ROOT / "loadtest" / "baselines"
SERVED = "classifier"
"""Name of the model in Triton."""
MAX_BATCH = 32
SEQSERVE, PLAIN, TRITON = "seqserve", "plain FastAPI", "Triton"


class Ports(NamedTuple):
    http: int
    grpc: int


class Launch(NamedTuple):
    """A command and its environment. ready: the path that answers when the server is ready."""

    command: Sequence[str]
    ready: str
    environment: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Server:
    """One compared server.

    launch: returns the command from its environment's folder, an empty folder for its files, and its ports. environment: name of its
    virtual environment in ENVIRONMENTS; None: the environment of this project. constant: whether it is also measured without a model,
    when it returns a constant.
    """

    name: str
    launch: Callable[[Path, Path, Ports], Launch]
    endpoints: tuple[Endpoint, ...]
    environment: str | None = None
    constant: bool = False

    def why_skipped(self) -> str | None:
        """Return why the server cannot run here."""
        if self.environment is None:
            return None
        folder = ENVIRONMENTS / self.environment
        return None if (folder / "installed").is_file() else f"not installed: {_last_line(folder / 'install.log')}"

    @contextmanager
    def running(self, models: Path, model: str | None, scratch: Path) -> Iterator[ServerProcess]:
        """Run the server with a model, or without to get its constant answer. `scratch` gets its files and its log."""
        ports = Ports(*servers.free_ports(2))
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        launch = self.launch(ENVIRONMENTS / str(self.environment), scratch, ports)
        environment = {"PYTHONPATH": servers.python_path(), "TOKENIZERS_PARALLELISM": "false", "SEQSERVE_MODELS": str(models)}
        if model is not None:
            environment[MODEL_VARIABLE] = str((models / model / "1").resolve())
        url, grpc = f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}"
        everything = environment | dict(launch.environment)
        with servers.started(launch.command, everything, url, grpc, launch.ready, scratch / "server.log") as server:
            yield server


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((line for line in reversed(lines) if line.strip()), "run `make loadtest SCENARIO=serving`")


def _seqserve(folder: Path, scratch: Path, ports: Ports) -> Launch:
    flags = ("--port", str(ports.http), "--grpc-port", str(ports.grpc), "--device", "cpu")
    return Launch((sys.executable, *servers.seqserve(*flags)), "/readyz")


def _plain(folder: Path, scratch: Path, ports: Ports) -> Launch:
    return Launch((sys.executable, "-m", "loadtest.baselines.plain_fastapi", "--port", str(ports.http)), "/health")


def _triton(folder: Path, scratch: Path, ports: Ports) -> Launch:
    """Write a model repository. Batches form without a delay, which measured best at every number of callers."""
    [packages] = (folder / "lib").glob("python*/site-packages")
    program = packages / "pytriton" / "tritonserver"
    version = packages.parent.name.removeprefix("python")
    repository = scratch / "repository"
    (repository / SERVED / "1").mkdir(parents=True)
    shutil.copy(BASELINES / "triton_model.py", repository / SERVED / "1" / "model.py")
    (repository / SERVED / "config.pbtxt").write_text(_TRITON_MODEL)
    flags = {"http-port": ports.http, "grpc-port": ports.grpc, "model-repository": repository}
    flags |= {"backend-directory": _triton_backends(program, version, scratch), "allow-metrics": "false", "log-info": "false"}
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{servers.python_path()}:{packages}",
        "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
    }
    command = (str(program / "bin" / "tritonserver"), *(f"--{name}={value}" for name, value in flags.items()))
    return Launch(command, "/v2/health/ready", environment)


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


_HTTP, _GRPC = (endpoint._replace(model=SERVED) for endpoint in (OIP_BINARY, OIP_GRPC))

SERVERS = (
    Server(SEQSERVE, _seqserve, (INFER, OIP_BINARY, OIP_GRPC)),
    Server(PLAIN, _plain, (PREDICT,)),
    Server(TRITON, _triton, (_HTTP, _GRPC), environment="triton", constant=True),
)
