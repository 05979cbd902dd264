"""One call for an answer, as every door handles it: counted, validated, sent to an engine, put into words. Nothing here knows HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from service.errors import InferenceFailed, InvalidInput, ServiceError, SessionConflict, TooLarge, Unavailable, UnknownModel
from service.frontend import head_outputs
from service.frontend.catalog import Catalog, unless_known
from service.frontend.dispatch.connection import Answered
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.rest import schemas
from service.frontend.served_model import ModelIndex, ServedModel
from service.ipc.messages import IndexEntry, Manifest, ModelKey, Request
from service.log import Log
from service.metrics import CUT_OFF, GONE, OK, Metrics, Snapshot
from service.settings import Settings

MOVES = 3
"""A chunk is sent so often at most, each time to the version that its session was of a moment before."""
UNKNOWN = ("unknown", "unknown")
"""Labels of a call that names no model that is served."""


class CallerGone(Exception):
    """The caller closed the connection before the answer."""


class Supervised(Protocol):
    """What a front asks of the supervisor."""

    async def scrape(self) -> Snapshot:
        """The counts of all processes."""

    async def index(self) -> list[IndexEntry]:
        """Every version in the models folder, served or not."""

    async def load(self, name: str, policy: str | None = None) -> None:
        """Serve what the folder of a model holds now, versions by this policy or else its own; returns when it is served, and raises a
        ServiceError, with what was served before served as before, when it cannot be."""

    async def unload(self, name: str) -> None:
        """Take a model out of service; returns when no request finds it any more. Raises UnknownModel."""


@dataclass(slots=True)
class Frontend:
    """What the doors work with. `draining` says that the service is about to end."""

    settings: Settings
    models: Catalog
    engines: Dispatcher
    metrics: Metrics
    log: Log
    supervisor: Supervised
    draining: bool = False

    @property
    def ready(self) -> bool:
        return self.engines.ready and not self.draining

    def serve(self, manifest: Manifest) -> None:
        """Turn to what is to be served now, all of which `models` knows."""
        gone = self.models.serve([model_version.key for model_version in manifest.model_versions], manifest.aliases)
        self.metrics.start(one.key.labels for one in self.models.served)
        for key in gone:
            self.engines.release(key)

    def forget(self, key: ModelKey) -> None:
        """Nothing of this version is left anywhere."""
        self.models.forget(key)
        if not any(one.key.labels == key.labels for one in self.models.served):
            self.metrics.forget(*key.labels)

    @property
    def catalog(self) -> ModelIndex:
        """What is served now."""
        return self.models.catalog


@dataclass(slots=True)
class Call:
    """One call as the metrics see it."""

    arrived: float
    labels: tuple[str, str] = UNKNOWN
    outcome: str = OK


@contextmanager
def counted(metrics: Metrics, arrived: float) -> Iterator[Call]:
    """Every call that is accepted is in flight, and then ends in exactly one outcome; what was raised goes on."""
    call = Call(arrived)
    metrics.accepted.add()
    metrics.in_flight.add()
    try:
        yield call
    except ServiceError as error:
        call.outcome = error.code
        raise
    except CallerGone:
        call.outcome = GONE
        raise
    except asyncio.CancelledError:
        call.outcome = CUT_OFF
        raise
    except Exception:
        call.outcome = InferenceFailed.code
        raise
    finally:
        metrics.in_flight.add(by=-1)
        metrics.requests.add(*call.labels, call.outcome)
        seconds = time.monotonic() - call.arrived
        metrics.stage_seconds.observe(seconds, *call.labels, "total")
        if call.outcome == OK:
            metrics.last_answer.set(datetime.now(UTC).timestamp(), *call.labels)
        else:
            metrics.failed_seconds.add(*call.labels, by=seconds)


Lay = Callable[[ServedModel], tuple[Request, bytes]]
"""Lays what a caller sent out for a model, as its spec and its tokenizer want it; raises a ServiceError."""


async def run(
    frontend: Frontend, call: Call, name: str, version: str | int | None, session: str | None, lay: Lay
) -> tuple[ServedModel, Answered]:
    """What a caller sent, answered by the model that he named, and which that was; raises a ServiceError.

    version: None for the newest, or for the session's own. Requests leave for an engine in the order in which this is begun to be awaited.
    """
    model, unknown = unless_known(frontend.models, name, version)
    for _ in range(MOVES):
        call.labels = model.key.labels
        try:
            request, tail = lay(model)
            if unknown is not None:
                request = _going_on(request, unknown)
            frontend.metrics.stage_seconds.observe(time.monotonic() - call.arrived, *call.labels, "parse")
            return model, await frontend.engines.submit(request, tail)
        except (SessionConflict, InvalidInput, TooLarge) as fault:
            # A session stays with the version that it began with, whatever is the newest now, and may be laid out as that one only.
            own = await _own(frontend, model, session, fault)
            if own is None or (version is not None and own.version != model.version):
                raise
            model, unknown = own, None
    raise SessionConflict("the session begins anew and anew while this chunk comes: send one after the other", field="session")


async def _own(frontend: Frontend, model: ServedModel, session: str | None, fault: ServiceError) -> ServedModel | None:
    """The version that a session is of, when that is another one than was taken to be meant, and so the reason of the fault."""
    if isinstance(fault, SessionConflict):
        key = fault.elsewhere and ModelKey(*fault.elsewhere)
    elif session is None or not frontend.models.others(model.key):
        return None
    else:
        key = await frontend.engines.model_of_session(session)
    return frontend.models[key] if key and key != model.key and key.name == model.spec.name and key in frontend.models else None


def _going_on(request: Request, unknown: UnknownModel) -> Request:
    """A chunk of a session that may have begun with a version which is served no longer, and nothing else; raises what it is otherwise."""
    if request.session is None or request.session_starts:
        raise unknown
    return msgspec.structs.replace(request, session_starts=False)


async def answer(frontend: Frontend, call: Call, body: schemas.InferBody) -> bytes:
    """The answer to POST /infer, or to a message on /stream, as JSON; raises a ServiceError."""

    def lay(model: ServedModel) -> tuple[Request, bytes]:
        return schemas.sequences(body, model, frontend.settings, call.arrived)

    model, (shapes, data) = await run(frontend, call, body.model, body.version, body.session, lay)
    start = time.monotonic()
    said = {"model": model.spec.name, "version": model.version}
    outputs = head_outputs.outputs(model.spec, shapes, data, body.field_of)
    session = {} if body.session is None else {"session": {"id": body.session, "steps": shapes.session_steps}}
    encoded = msgspec.json.encode({**said, "outputs": outputs, **session})
    frontend.metrics.stage_seconds.observe(time.monotonic() - start, *call.labels, "encode")
    return encoded


def check_ready(frontend: Frontend) -> None:
    """Whether requests are answered now; raises Unavailable."""
    if not frontend.ready:
        reason = "draining" if frontend.draining else "no engine is ready"
        raise Unavailable(f"not ready: {reason}", retry_after=1)


def bug(frontend: Frontend, fault: Exception) -> InferenceFailed:
    """What a caller is told of a fault of ours; the log has the rest."""
    frontend.log.error("bug", error=f"{type(fault).__name__}: {fault}")
    return InferenceFailed("the service failed on this request: its log says why")
