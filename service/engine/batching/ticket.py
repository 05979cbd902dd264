"""A request in the engine: its ticket, its sequences, and the session that a sequence continues. Knows neither a queue nor a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from service.engine.batching.model_queue import QueuedSequence
from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.session_state import State
from service.engine.batching.state_slots import StateSlot
from service.engine.execution.in_flight import ChunkResult
from service.errors import ServiceError
from service.ipc.messages.inference import MAX_RUNS, Answer, BatchRun, Request
from service.ipc.messages.models import ModelKey

SendAnswer = Callable[[Answer, list[bytes]], None]
SendRefusal = Callable[[ServiceError], None]
FLOAT_BYTES = 4
ARRAYS = ("scores", "picks", "embedding", "sequence")


@dataclass(slots=True, eq=False)
class StateLocation:
    """Where the state of a session is: in a slot, or on the host. In neither place while the session is at its beginning."""

    key: ModelKey
    slot: StateSlot | None = None
    on_host: State | None = None


class Ownership(NamedTuple):
    """The ownership of a session in the session store.

    number: no other ownership has it. begun: when the session began, in milliseconds of Unix time. anew: the store has no record of it yet.
    """

    number: int
    begun: int
    anew: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """A sequence that arrives in chunks.

    record: its record in the journal.
    steps: of all chunks that were answered.
    idle_since: when its last chunk left.
    chunks: chunks without an answer, oldest first; only the first may run.
    earlier_end: why the session of the same id before it ended without its client's knowledge, or None.
    ownership: of this replica, None without a session store.
    uncertain: its client may have answers to later chunks than this state has. Only a chunk that names these steps may continue.
    unsaved: chunks since it was saved last.
    """

    id: str
    location: StateLocation
    record: int
    steps: int = 0
    idle_since: float = 0.0
    chunks: deque[RequestSequence] = field(default_factory=deque)
    earlier_end: str | None = None
    ownership: Ownership | None = None
    uncertain: bool = False
    unsaved: int = 0

    @property
    def key(self) -> ModelKey:
        return self.location.key

    @property
    def ending(self) -> bool:
        """Whether its last chunk has arrived."""
        return bool(self.chunks) and not self.chunks[-1].keeps_state

    @property
    def next_steps(self) -> int:
        """Return the steps after all chunks that have arrived."""
        steps = self.steps
        for chunk in self.chunks:
            steps = chunk.ticket.request.lengths[0] + (0 if chunk.restarts else steps)
        return steps


@dataclass(slots=True, eq=False, kw_only=True)
class RequestSequence(QueuedSequence):
    """One sequence of a request. Its chunks finish in the order of their launches.

    data: the bytes of the steps that have not been launched, `step_bytes` per step.
    session: the session that this sequence continues, if any.
    ownership: of this session from this sequence on, if it begins an open session again.
    slot: where its state is after its newest batch.
    read_slot: where that batch reads its state, until the batch is launched.
    results: of its finished chunks; steps: the steps of these chunks.
    restarts: whether it begins its session again. The session keeps its earlier state until this chunk is answered.
    initial_state: the state that it starts from, if its request brings one; final_state: the states after it, if its request asks for them.
    """

    ticket: Ticket
    data: memoryview
    step_bytes: int
    session: Session | None
    restarts: bool
    initial_state: State | None
    ownership: Ownership | None = None
    slot: StateSlot | None = None
    read_slot: StateSlot | None = None
    launched: int = 0
    finished: int = 0
    results: list[ChunkResult] = field(default_factory=list)
    steps: int = 0
    final_state: bytes | None = None

    @property
    def session_steps(self) -> int:
        """The steps of its session after it."""
        if self.session is None:
            return 0
        return self.steps if self.restarts else self.session.steps + self.steps

    @property
    def keeps_state(self) -> bool:
        """Whether its state is needed after it: for its session, or for the answer."""
        request = self.ticket.request
        return request.returns.state or (self.session is not None and not request.session_ends)

    def take_bytes(self, steps: int) -> memoryview:
        """Remove and return the data of the next `steps` steps."""
        size = steps * self.step_bytes
        taken, self.data = self.data[:size], self.data[size:]
        return taken

    def add_result(self, result: ChunkResult) -> bool:
        """Add the result of the next chunk. Returns whether the sequence is complete."""
        self.results.append(result)
        self.steps += result.steps
        self.finished += 1
        return not self.remaining and self.finished == self.launched


class Ticket:
    """The promise of one reply to one request. It ends exactly once: answered, refused or abandoned."""

    def __init__(self, request: Request, reply: SendAnswer, refuse: SendRefusal) -> None:
        self.request = request
        self.key = request.key
        self._reply = reply
        self._refuse = refuse
        self._incomplete = 0
        self.sequences: list[RequestSequence] = []
        self.runs: list[BatchRun] = []
        """The batches of a timed request, at most MAX_RUNS."""
        self.ended = False

    def open(self, sequences: list[RequestSequence]) -> None:
        self.sequences, self._incomplete = sequences, len(sequences)

    def add_run(self, run: BatchRun) -> None:
        """Note a batch that ran steps of the request. Beyond MAX_RUNS, each replaces the last."""
        if self.runs and self.runs[-1] is run:
            return
        if len(self.runs) == MAX_RUNS:
            self.runs.pop()
        self.runs.append(run)

    def sequence_done(self) -> bool:
        """Count one more complete sequence. Returns whether all are complete."""
        self._incomplete -= 1
        return not self._incomplete

    def answer(self, ready: float, session_steps: int = 0) -> None:
        """Answer with the results of all sequences.

        ready: when the last of them was. session_steps: steps of the session so far, if the request is a chunk.
        """
        shapes: dict[str, Any] = {}
        data: list[bytes] = []
        single_chunks = all(len(sequence.results) == 1 for sequence in self.sequences)
        results = self.sequences[0].results  # none of a request that only ends a session
        for index, name in enumerate(ARRAYS if results else ()):
            if results[-1][index] is None:
                continue
            arrays: list[Any] = (
                [sequence.results[0][index] for sequence in self.sequences] if single_chunks else _arrays(self.sequences, index)
            )
            shapes[name] = (sum([len(array) for array in arrays]), *arrays[0].shape[1:])
            data += [array.tobytes() for array in arrays]
        steps = [sequence.steps for sequence in self.sequences if results]
        states = [sequence.final_state for sequence in self.sequences if sequence.final_state is not None]
        if states:
            shapes["state"] = len(states), len(states[0]) // FLOAT_BYTES
            data += states
        if self.runs:
            shapes |= {"queued": self.sequences[0].arrived, "runs": self.runs}
        self._reply(Answer(**shapes, steps=steps, session_steps=session_steps, ready=ready), data)
        self.end()

    def answer_not_finite(self, ready: float) -> None:
        """Answer a chunk that led to values that are not finite. The frontend refuses it, in the words of its API."""
        self._reply(Answer(ready=ready, finite=False), [])
        self.end()

    def refuse(self, error: ServiceError) -> None:
        self.end()
        self._refuse(error)

    def end(self) -> None:
        """End without a reply, as when the client has disconnected."""
        assert not self.ended, "a ticket ends once"
        self.ended = True
        # Breaks the reference cycles with the sequences and batches: all are freed at once, without the garbage collector.
        self.sequences = []


def _arrays(sequences: list[RequestSequence], index: int) -> list[Any]:
    """Return the arrays of one kind from sequences of several chunks: every chunk's if they have a line per step, else the last chunk's."""
    per_step = ARRAYS[index] == "sequence" or (sequences[0].results[-1].per_step and ARRAYS[index] != "embedding")
    return [result[index] for sequence in sequences for result in (sequence.results if per_step else sequence.results[-1:])]


def unpack(block: QueuedBlock) -> list[RequestSequence]:
    """Return the sequences of a block with one request, which gets a ticket."""
    [id] = block.ids
    name, version, generation = block.model
    request = Request(
        name,
        version,
        block.lengths,
        block.deadline,
        sent=block.arrived,
        priority=block.priority,
        returns=block.returns,
        generation=generation,
        share=block.share,
        timed=block.timed,
    )
    ticket: Ticket = block.owner.open_ticket(id, request)
    sequences = sequences_of(ticket, block.columns.values, None, divisible=block.divisible)
    ticket.open(sequences)
    return sequences


def sequences_of(
    ticket: Ticket,
    data: bytes | memoryview,
    session: Session | None,
    *,
    divisible: bool,
    initial_states: Sequence[State] = (),
) -> list[RequestSequence]:
    """Split the data of a request into its sequences. initial_states: of each sequence, or none."""
    request = ticket.request
    view, begin, step_bytes = memoryview(data), 0, len(data) // max(1, sum(request.lengths))
    sequences = []
    for steps, initial_state in zip_longest(request.lengths, initial_states):
        end = begin + steps * step_bytes
        sequences.append(
            RequestSequence(
                steps,
                request.deadline,
                request.priority,
                divisible=divisible,
                stateful=session is not None or request.has_states,
                share=request.share,
                ticket=ticket,
                data=view[begin:end],
                step_bytes=step_bytes,
                session=session,
                restarts=session is not None and request.session_starts is True,
                initial_state=initial_state,
            )
        )
        begin = end
    return sequences
