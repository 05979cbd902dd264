"""Runs models in this process, without a server: `seqserve infer`, benchmarks and tests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import torch

from kernels.folder import set_cache_folder
from service.cores import compute_threads, usable_cores
from service.engine import build
from service.engine.batching.request_block import QueuedBlock
from service.engine.execution.device import allow_tf32
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import BlockResult
from service.engine.frontend_channel import answer_message
from service.engine.internal_errors import InternalErrors
from service.errors import ServiceError
from service.frontend.dispatch.empty_rows import EmptyRows
from service.frontend.run import head_outputs, validation
from service.frontend.run.catalog import build_catalog
from service.ipc.blocks import block_key, encode_block, split_answers
from service.ipc.channel import decode
from service.ipc.messages.inference import Answer, AnswerWithoutSteps, Request, RequestBlock
from service.log import Log
from service.metrics import Metrics
from service.modeling import spec
from service.modeling.array_run import check_names, run_arrays
from service.modeling.encoder import Encoder
from service.modeling.npz import Array, read_npz, write_npz
from service.modeling.store import read_arrays
from service.modeling.tokenizer import Tokenizer
from service.settings import Settings
from service.supervisor.repository import Repository


@dataclass
class _LocalRequest:
    """A QueuedRequest."""

    id: int
    request: Request
    data: bytes | memoryview


class _LocalOwner(NamedTuple):
    """The BlockOwner of a single request."""

    rows: EmptyRows

    def answer(self, block: QueuedBlock, result: BlockResult, ready: float) -> None:
        message, columns = answer_message(block, result, ready)
        for _, answer, data in split_answers(message, b"".join(columns)):
            self.rows.answered(answer, data)

    def refuse(self, ids: Sequence[int], error: ServiceError) -> None:
        self.rows.failed(error)


def build_engine(settings: Settings, metrics: Metrics) -> DeviceEngine:
    """Build an engine on the first device with every model loaded, each with generation 0; raises StartError."""
    versions = Repository(settings.models, settings.versions, settings.alias).manifest().model_versions
    versions = [msgspec.structs.replace(version, generation=0) for version in versions]
    return build.build_engine(versions, settings, metrics, Log("engine"), threads=_compute_threads(settings))


def infer(settings: Settings, name: str, texts: list[str]) -> list[dict[str, Any]]:
    """Return one output per text, from the first device; raises the error that the HTTP API would return."""
    metrics, log = Metrics(), Log("infer")
    manifest = Repository(settings.models, settings.versions, settings.alias).readable_manifest()
    model = build_catalog(manifest, log, strict=True).find(name, None)
    versions = [version for version in manifest.model_versions if version.key == model.key]
    engine = build.build_engine(versions, settings, metrics, log, threads=_compute_threads(settings))
    batcher = build.build_batcher(settings, engine, metrics, InternalErrors(log, metrics))
    packed = validation.pack_inputs(texts, head_outputs.input_field, model, settings)
    options = validation.Options(validation.requested_returns((), model.spec), settings.default_deadline_ms)
    request = validation.engine_request(packed, options, model, time.monotonic())
    answers: list[tuple[Answer, bytes]] = []
    errors: list[ServiceError] = []
    receiver: Any = SimpleNamespace(answered=lambda *answer: answers.append(answer), failed=errors.append)
    known = engine.loaded()[0].without_steps or AnswerWithoutSteps(Answer(), b"")  # a model without one refuses such inputs
    rows = EmptyRows(request, packed.data, known, receiver)
    rest, data = rows.rest()
    if rest.lengths:
        key = block_key(rest)
        frame = decode(b"".join(encode_block(key, [_LocalRequest(1, rest, data)])))
        assert isinstance(frame.message, RequestBlock)
        divisible = engine.streams(model.key)
        batcher.submit(QueuedBlock.read(key, frame.message, frame.tail, _LocalOwner(rows), divisible=divisible))
    else:
        receiver.answered(*rows.alone())
    while not answers and not errors:
        batcher.step()
    if errors:
        raise errors[0]
    outputs: list[dict[str, Any]] = msgspec.json.decode(model.writer.write(*answers[0]))
    return outputs


def infer_arrays(settings: Settings, model: str, npz: Path, out: Path) -> dict[str, Array]:
    """Run a model on the arrays of a file, write every output to `out` and return them; raises ModelError.

    model: the name of a model in the models folder, or a version folder. `service.modeling.array_run` describes the arrays. Expected
    outputs, which the file of `seqserve import --check` also has, are not read.
    """
    folder, name = Path(model), None
    if not (folder / spec.MODEL).is_file():
        found = Repository(settings.models, settings.versions, settings.alias).readable_manifest()
        key = build_catalog(found, Log("infer"), strict=True).find(model, None).key
        folder, name = next(Path(version.folder) for version in found.model_versions if version.key == key), key.name
    description = spec.read(folder, name)
    set_cache_folder(settings.cache)
    torch.set_num_threads(_compute_threads(settings))
    arrays, device = read_arrays(folder, description), build.named_device(settings.devices[0])
    allow_tf32(device, settings.tf32)
    encoder = Encoder(description, arrays, device)
    tokenizer = Tokenizer.read(folder, description) if description.input.kind == "text" else None
    inputs = read_npz(npz)
    outputs = run_arrays(encoder, inputs, tokenizer)
    check_names(description, inputs, outputs)
    write_npz(out, outputs)
    return outputs


def _compute_threads(settings: Settings) -> int:
    """Return the threads of the engine. One core stays free for the caller."""
    return compute_threads(usable_cores(), 1, len(settings.devices))
