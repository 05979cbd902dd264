"""Write lines with a served language model over bytes: by sampling, or the most probable ones by beam search.

Every line is a session that gets one byte in a chunk. A beam that continues in several ways is forked.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nlargest
from itertools import count
from uuid import uuid4

from train_language import BOUNDARY
from training import service
from training.service import Service

Chances = dict[int, float]
"""The probability of each next byte."""


@dataclass(frozen=True)
class Line:
    """A line, and the logarithm of its probability."""

    text: bytes
    logarithm: float

    @property
    def mean(self) -> float:
        """The mean logarithm of a byte, the end of the line included, so that lines of several lengths compare."""
        return self.logarithm / (len(self.text) + 1)


@dataclass(frozen=True)
class Beam(Line):
    """A line that may continue. session: has received the line; chances: of the next byte."""

    session: str
    chances: Chances


class Writer:
    """Sessions of one model."""

    def __init__(self, service: Service, model: str) -> None:
        self._service = service
        self._model = model
        self._names = (f"writer-{uuid4().hex}-{number}" for number in count())

    def begin(self, text: str) -> Beam:
        """Open a session with the beginning of a line."""
        session = next(self._names)
        return Beam(text.encode(), 0.0, session, self._send(session, [BOUNDARY, *text.encode()]))

    def fork(self, session: str) -> str:
        """Open another session that continues from the same state, and return its name."""
        copy = next(self._names)
        self._service.fetch_json(f"/sessions/{session}/fork", {"session": copy})
        return copy

    def extend(self, beam: Beam, byte: int, session: str) -> Beam:
        """Return the beam with one more byte, which its session receives."""
        logarithm = beam.logarithm + math.log(beam.chances[byte])
        return Beam(beam.text + bytes([byte]), logarithm, session, self._send(session, [byte]))

    def close(self, session: str) -> None:
        self._service.fetch_json(f"/sessions/{session}/state", method="DELETE")

    def _send(self, session: str, chunk: list[int]) -> Chances:
        [output] = self._service.fetch_json("/infer", {"model": self._model, "session": session, "inputs": [chunk]})["outputs"]
        return dict(zip(output["ids"], output["scores"], strict=True))


def sample(writer: Writer, text: str, longest: int, temperature: float, source: random.Random) -> bytes:
    """Return a line. temperature: below 1 prefers probable bytes, 1 draws with the model's probabilities."""
    beam = writer.begin(text)
    while len(beam.text) < longest:
        weights = [chance ** (1 / temperature) for chance in beam.chances.values()]
        [byte] = source.choices(list(beam.chances), weights)
        if byte == BOUNDARY:
            break
        beam = writer.extend(beam, byte, beam.session)
    writer.close(beam.session)
    return beam.text


def search(writer: Writer, text: str, longest: int, width: int) -> list[Line]:
    """Return up to `width` ended lines, the line with the highest mean logarithm first."""
    beams, ended = [writer.begin(text)], list[Line]()
    while beams and len(beams[0].text) < longest:
        choices = nlargest(width, _continuations(beams, width))
        ended += [Line(beams[index].text, logarithm) for logarithm, index, byte in choices if byte == BOUNDARY]
        beams = _extended(writer, beams, [(index, byte) for _, index, byte in choices if byte != BOUNDARY])
        if len(ended) >= width:
            break
    for beam in beams:
        writer.close(beam.session)
    return sorted(ended or beams, key=lambda found: found.mean, reverse=True)[:width]


def _continuations(beams: list[Beam], width: int) -> Iterator[tuple[float, int, int]]:
    """Yield the logarithm of each continued line, the index of its beam and the next byte."""
    for index, beam in enumerate(beams):
        for byte, chance in nlargest(width, beam.chances.items(), key=lambda pair: pair[1]):
            if chance > 0:
                yield beam.logarithm + math.log(chance), index, byte


def _extended(writer: Writer, beams: list[Beam], choices: list[tuple[int, int]]) -> list[Beam]:
    """Return the chosen continuations. The last continuation of a beam takes its session, and the others take forks of the session."""
    extended = []
    for number, (index, byte) in enumerate(choices):
        session = beams[index].session
        is_last = all(other != index for other, _ in choices[number + 1 :])
        extended.append(writer.extend(beams[index], byte, session if is_last else writer.fork(session)))
    for index in {*range(len(beams))} - {index for index, _ in choices}:
        writer.close(beams[index].session)
    return extended


def main(line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="name of a language model over bytes")
    parser.add_argument("--text", default="", help="the beginning of the lines")
    parser.add_argument("--lines", type=int, default=3, help="number of lines (default: %(default)s)")
    parser.add_argument("--beams", action="store_true", help="search the most probable lines with --lines beams")
    parser.add_argument("--longest", type=int, default=200, help="bytes of a line (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of sampling (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of sampling (default: %(default)s)")
    service.add_flags(parser)
    flags = parser.parse_args(line)
    writer = Writer(Service(flags.url, flags.key_file, flags.ca), flags.model)
    try:
        if flags.beams:
            for beam in search(writer, flags.text, flags.longest, flags.lines):
                print(f"{beam.mean:.3f} {beam.text.decode(errors='replace')}")
        else:
            source = random.Random(flags.seed)
            for _ in range(flags.lines):
                print(sample(writer, flags.text, flags.longest, flags.temperature, source).decode(errors="replace"))
    except OSError as error:
        print(service.problem(flags, error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
