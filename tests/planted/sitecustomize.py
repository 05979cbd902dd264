"""Plants faults into every Python process that has this folder on its PYTHONPATH. The service itself contains nothing of this.

PLANTED names faults of a server, separated by commas:
- sticky, endless, memory: a device error in a batch on a GPU that has a sequence of exactly STEPS time steps;
- failed-capture: captures of graphs of the model HARMED_MODEL fail as the file CAPTURE says: `synchronizes` is an illegal call that
  raises, `invalid` an illegal call whose error is ignored, `raises` an error of Python. An empty file harms nothing;
- ends-anywhere: a process kills itself when any request reaches the point that the file ENDS/<its process id> names. POINTS are
  the points of an engine, and FRONTEND_POINTS the points of a frontend;
- deadly: an engine kills itself when it loads the model DEADLY_MODEL, or starts a batch of it, as the file DEADLY says: `load` or `batch`;
- slow-device: each batch waits DEVICE_SECONDS, in which a device would compute: it takes no processor time;
- slow-frontend: a frontend or its decoder waits FRONTEND_SECONDS while it decodes a request to /infer or to ModelInfer: it takes no
  processor time;
- damaged: once the file DAMAGED exists, every model computes wrong scores;
- gated-device: a batch stays in flight until the file GATE lets it end. It contains `open`, or a number of batches;
- dated-device: as slow-device, and the engine appends a line to the file ROWS for each batch: its rows, and how many of their deadlines had
  passed when the batch was formed;
- timed-callbacks: frontends append each callback of their event loop that takes longer than TIMED_SECONDS to the file CALLBACKS;
- recorded: processes append what they open and each use of the network to the file RECORD: see RECORDED;
- portable: a system without memfd_create, eventfd, sched_getaffinity and /proc, whose prctl fails.

PLANTED_CONSTANTS is a JSON object of other values of constants, by module and name: {"service.supervisor.ports.BACKLOG": 1}.
MONOTONIC_SHIFT is added to time.monotonic(): the machine seems to have booted at another time. See tests/anywhere.py.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

STEPS = 13
DEADLY_MODEL = "deadly"
HARMED_MODEL = "harmed"
DEVICE_SECONDS = 0.04
FRONTEND_SECONDS = 0.01
GATE_SECONDS = 0.002
TIMED_SECONDS = 0.001
KERNELS = {"sticky": "*(volatile int*)0x10 = 1;", "endless": "while (true) { __nanosleep(1000); }"}
LINUX_ONLY = ("memfd_create", "eventfd", "eventfd_read", "eventfd_write", "sched_getaffinity", "sched_setaffinity")
RECORDED = {"open": 0, "os.listdir": 0, "os.scandir": 0, "urllib.Request": 0}
RECORDED |= dict.fromkeys(("socket.connect", "socket.sendto", "socket.getnameinfo"), -1)
RECORDED |= dict.fromkeys(("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"), 0)
"""Audit events of Python, and which of their arguments is recorded."""
POINTS = ("received", "launching", "launched", "answering", "answered")
"""Points on the way of a request through an engine: its frame was read, its batch starts, its batch was started, its answer is about to be
written, its answer was written."""
FRONTEND_POINTS = ("parsed", "sent", "returned", "replying", "replied")
"""Points on the way of a request through a frontend: it is about to be sent to an engine, it was written to the engine's channel, its
answer has arrived, its reply is about to be written, its reply was written."""


def nothing(*_: Any) -> None:
    """Do nothing."""


def around(owner: Any, name: str, before: Callable[..., object], after: Callable[..., object] = nothing) -> None:
    """Call `before` with the arguments of each call of a method, and `after` with its result and its arguments."""
    method = getattr(owner, name)

    def planted(*arguments: Any, **options: Any) -> Any:
        before(*arguments)
        result = method(*arguments, **options)
        after(result, *arguments)
        return result

    setattr(owner, name, planted)


def raise_device_error(fault: str) -> None:
    if fault == "memory":
        import torch

        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        return
    import cupy
    import torch

    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    kernel = cupy.RawKernel(f'extern "C" __global__ void planted() {{ {KERNELS[fault]} }}', "planted")
    with stream:
        kernel((1,), (1,), ())


def into_batches(graphs: Any, fault: str) -> None:
    def harm(_: Any, batch: Any, *others: Any) -> None:
        if any(STEPS in block.lengths for block in batch.blocks):
            raise_device_error(fault)

    around(graphs.CudaGraphRunner, "launch", harm)


def fail_capture(how: str) -> None:
    """Fail within the capture on the current stream."""
    import ctypes

    import torch

    stream = torch.cuda.current_stream()
    if how == "synchronizes":
        stream.synchronize()
    elif how == "invalid":
        ctypes.CDLL("libcuda.so.1").cuStreamSynchronize(ctypes.c_void_p(stream.cuda_stream))
    elif how == "raises":
        raise ValueError("a planted error")


def into_captures(runner: Any, fault: str) -> None:
    import torch

    capture = Path(os.environ["CAPTURE"])

    def fail(_: Any, graphs: Any, bucket: Any) -> None:
        if graphs.encoder.spec.name == HARMED_MODEL and torch.cuda.is_current_stream_capturing():
            fail_capture(capture.read_text())

    around(runner.CudaGraphRunner, "_encode_bucket", nothing, fail)


def end_at(point: str, *_: object) -> None:
    """End this process without a word if it is to end at this point."""
    file = Path(os.environ["ENDS"], str(os.getpid()))
    if file.exists() and file.read_text() == point:
        os.kill(os.getpid(), signal.SIGKILL)


def ends(owner: Any, name: str, before: str, after: str = "") -> None:
    """Make the beginning of a method, and its end, points at which the process may end."""
    around(owner, name, partial(end_at, before), partial(end_at, after) if after else nothing)


def end_with(model: str, work: str) -> None:
    """End this process without a word if it begins the work that the model does not survive."""
    if model == DEADLY_MODEL and Path(os.environ["DEADLY"]).read_text() == work:
        os.kill(os.getpid(), signal.SIGKILL)


def into_loads(encoder: Any, fault: str) -> None:
    around(encoder.Encoder, "__init__", lambda *arguments: end_with(arguments[1].name, "load"))


def into_batches_of_a_model(device_engine: Any, fault: str) -> None:
    around(device_engine.DeviceEngine, "launch", lambda _, batch: end_with(batch.model.name, "batch"))


def into_gates(device_engine: Any, fault: str) -> None:
    """Let batches be in flight as on a GPU, and end them as the gate says. A number counts from the last change of the file."""
    engine, gate = device_engine.DeviceEngine, Path(os.environ["GATE"])
    collect, running = engine._collect, engine.running.fget
    passed: list[Any] = ["", 0]

    def lets_pass() -> bool:
        text = gate.read_text()
        if text != passed[0]:
            passed[:] = text, 0
        passes = text == "open" or passed[1] < int(text.split()[-1])
        passed[1] += passes
        return passes

    def collecting(self: Any) -> None:
        if self._in_flight and lets_pass():
            collect(self)
        elif self._in_flight:
            time.sleep(GATE_SECONDS)

    engine._collect = collecting
    engine.accepts_batch = property(lambda self: not self._in_flight)
    # A batch is never hung, however long it waits at the gate.
    engine.running = property(lambda self: (time.monotonic(), running(self)[1]) if self._in_flight else None)


def into_models(encoder: Any, fault: str) -> None:
    import torch

    damaged = Path(os.environ["DAMAGED"])

    def harm(encoding: Any, *_: Any) -> None:
        if damaged.exists() and encoding.head_output.scores is not None:
            with torch.inference_mode():
                encoding.head_output.scores.mul_(0.5)

    around(encoder.Encoder, "__call__", nothing, harm)


def into_batchers(batcher: Any, fault: str) -> None:
    """Record the rows of each batch, and how many of their deadlines had passed when it was formed."""
    dropped_at = 0.0

    def note(_: Any, now: float) -> None:
        nonlocal dropped_at
        dropped_at = now

    def record(_: Any, model: Any, blocks: Any, *others: Any) -> None:
        late = sum(deadline <= dropped_at for block in blocks for deadline in block.deadlines)
        with Path(os.environ["ROWS"]).open("a") as file:
            file.write(f"{sum(block.sequences for block in blocks)} {late}\n")

    around(batcher.Batcher, "_drop_late", note)
    around(batcher.BatchRuns, "_run", record)


def into_workers(worker: Any, fault: str) -> None:
    answered: set[Any] = set()

    def answering(frontend: Any, *others: Any) -> None:
        end_at("answering")
        answered.add(frontend.channel)

    def flushed(_: Any, worker: Any, channel: Any, *others: Any) -> None:
        if channel in answered:
            answered.remove(channel)
            end_at("answered")

    ends(worker.Worker, "_handle_block", "received")
    around(worker.FrontendChannel, "answer", answering)
    around(worker.Worker, "_flush", nothing, flushed)


def into_connections(connection: Any, fault: str) -> None:
    def returning(_: Any, frame: Any) -> None:
        if type(frame.message).__name__ in ("AnswerBlock", "Refusal", "RefusalBlock"):
            end_at("returned")

    def written(_: Any, connection: Any, size: int, writes: int) -> None:
        if size:
            end_at("sent")

    around(connection.EngineConnection, "_handle_frame", returning)
    around(connection.EngineConnection, "_count_written", nothing, written)


def remove_linux() -> None:
    """Hide the interfaces that only Linux has. Processes and descriptors stay readable under /proc for the tests, which do not run here."""
    import builtins
    import ctypes
    import io
    import pathlib

    for name in LINUX_ONLY:
        if hasattr(os, name):
            delattr(os, name)

    class Library(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:
            return (lambda *_: -1) if name == "prctl" else super().__getattr__(name)

    def refusing(function: Any) -> Any:
        def planted(file: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(file, (str, os.PathLike)) and str(file).startswith("/proc"):
                raise FileNotFoundError(2, "No such file or directory", str(file))
            return function(file, *arguments, **options)

        return planted

    ctypes.CDLL = Library  # type: ignore[misc]
    io.open = builtins.open = refusing(builtins.open)
    os.open, os.listdir, os.scandir = refusing(os.open), refusing(os.listdir), refusing(os.scandir)
    pathlib.Path.open = refusing(pathlib.Path.open)  # type: ignore[method-assign]


def record_events() -> None:
    """Append a line for this process, and a line for each event of RECORDED."""
    file = os.open(os.environ["RECORD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        if event in RECORDED and not isinstance(recorded := arguments[RECORDED[event]], int):
            os.write(file, f"{event} {recorded!r}\n".encode(errors="surrogateescape"))

    sys.addaudithook(record)
    os.write(file, f"process {os.getpid()}\n".encode())


def shift_monotonic(seconds: float) -> None:
    """Add seconds to the monotonic clock."""
    monotonic, monotonic_ns = time.monotonic, time.monotonic_ns
    time.monotonic = lambda: monotonic() + seconds
    time.monotonic_ns = lambda: monotonic_ns() + int(seconds * 1e9)


def into_event_loops(uvicorn_config: Any, fault: str) -> None:
    """Record the CPU time of long callbacks. The event loop is asyncio's: uvloop has no place where its callbacks could be timed."""
    import asyncio

    uvicorn_config.LOOP_FACTORIES["uvloop"] = uvicorn_config.LOOP_FACTORIES["asyncio"]
    run, record = asyncio.Handle._run, Path(os.environ["CALLBACKS"])
    collecting = [0.0, 0.0]

    def collect(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collecting[0] = time.thread_time()
        else:
            collecting[1] += time.thread_time() - collecting[0]

    gc.callbacks.append(collect)

    def planted(self: Any) -> None:
        callback = self._callback
        collecting[1] = 0.0
        began = time.thread_time()
        run(self)
        seconds = time.thread_time() - began
        if seconds > TIMED_SECONDS:
            # The step of a task does not name its task, which it refers to.
            names = f"of which {collecting[1]:.6f} in collections: {callback!r} {gc.get_referents(callback)!r}"[:600]
            with record.open("a") as file:
                file.write(f"{seconds:.6f} {names}".replace("\n", " ") + "\n")

    asyncio.Handle._run = planted  # type: ignore[method-assign]
    transport: Any = asyncio.selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
    lose = transport._call_connection_lost

    def lose_and_release(self: Any, error: Exception | None) -> None:
        # Transports of asyncio refer to themselves, unlike transports of uvloop. Their garbage is not the service's.
        lose(self, error)
        self._read_ready_cb = None

    transport._call_connection_lost = lose_and_release


def into_decoding(module: Any, fault: str) -> None:
    runner = getattr(module, "InferRunner", None) or module.GrpcRunner
    around(runner, "decode", lambda *_: time.sleep(FRONTEND_SECONDS))


def into_decoders(worker: Any, fault: str) -> None:
    parsers = worker.PARSERS

    def planted(parse: Any, *arguments: Any) -> Any:
        time.sleep(FRONTEND_SECONDS)
        return parse(*arguments)

    worker.PARSERS = {api: partial(planted, parse) for api, parse in parsers.items()}


def into_constants(value: float, module: Any, name: str) -> None:
    constant = name.rpartition(".")[2]
    assert hasattr(module, constant), f"there is no constant {name}"
    setattr(module, constant, value)


class Planting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Plants a fault once its module has been imported. A frontend never imports torch, so nothing is imported early."""

    def __init__(self, fault: str, name: str, plant: Callable[[Any, str], None]) -> None:
        self._fault = fault
        self._name = name
        self._plant = plant

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None
        self._own = found.loader
        planted = importlib.machinery.ModuleSpec(name, self, origin=found.origin)
        planted.submodule_search_locations = found.submodule_search_locations
        return planted

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert self._own is not None
        self._own.exec_module(module)
        self._plant(module, self._fault)


def main() -> None:
    """Plant the faults that the environment names."""
    if shift := os.environ.get("MONOTONIC_SHIFT"):
        shift_monotonic(float(shift))
    for fault in filter(None, os.environ.get("PLANTED", "").split(",")):
        plant(fault)
    for name, value in json.loads(os.environ.get("PLANTED_CONSTANTS", "{}")).items():
        sys.meta_path.insert(0, Planting(name, name.rpartition(".")[0], partial(into_constants, value)))


def plant(fault: str) -> None:
    """Plant one fault."""
    if fault in AT_ONCE:
        AT_ONCE[fault]()
    elif fault not in OF_FRONTENDS or "service.frontend" in sys.orig_argv:
        for name, into in PLANTS[fault]:
            sys.meta_path.insert(0, Planting(fault, name, into))


OF_FRONTENDS = ("timed-callbacks",)
"""Faults of frontends only: the callbacks of a frontend's decoder take long."""
DEVICE_ENGINE, ENCODER = "service.engine.execution.device_engine", "service.modeling.encoder"
GRAPHS = "service.engine.execution.cuda_graph_runner"
DEVICE = (ENCODER, lambda module, _: around(module.Encoder, "__call__", lambda *_: time.sleep(DEVICE_SECONDS)))
Plants = tuple[tuple[str, Callable[[Any, str], None]], ...]
PLANTS: dict[str, Plants] = {
    "ends-anywhere": (
        ("service.frontend.dispatch.dispatcher", lambda module, _: ends(module.Dispatcher, "send", "parsed")),
        ("service.frontend.dispatch.connection", into_connections),
        ("service.frontend.http1.http_protocol", lambda module, _: ends(module.HttpProtocol, "_reply", "replying", "replied")),
        (DEVICE_ENGINE, lambda module, _: ends(module.DeviceEngine, "launch", "launching", "launched")),
        ("service.engine.worker", into_workers),
    ),
    **dict.fromkeys((*KERNELS, "memory"), ((GRAPHS, into_batches),)),
    "failed-capture": ((GRAPHS, into_captures),),
    "timed-callbacks": (("uvicorn.config", into_event_loops),),
    "deadly": ((ENCODER, into_loads), (DEVICE_ENGINE, into_batches_of_a_model)),
    "slow-device": (DEVICE,),
    "slow-frontend": (
        ("service.frontend.rest.infer", into_decoding),
        ("service.frontend.grpc.infer", into_decoding),
        ("service.frontend.decoder.worker", into_decoders),
    ),
    "dated-device": (DEVICE, ("service.engine.batching.batcher", into_batchers)),
    "gated-device": (
        (DEVICE_ENGINE, into_gates),
        ("service.engine.batching.scheduler", lambda module, _: setattr(module.Scheduler, "_surely_in_time", lambda *_: True)),
    ),
    "damaged": ((ENCODER, into_models),),
}
"""By fault: the modules in which it is planted, and the functions that plant it there."""
AT_ONCE: dict[str, Callable[[], None]] = {"portable": remove_linux, "recorded": record_events}
"""By fault: the function that plants it when the process starts."""


# The tests import this file as tests.planted.sitecustomize, for its constants.
if __name__ == "sitecustomize":
    main()
