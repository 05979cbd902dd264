"""The writer of lines: sampling, and beam search that forks sessions."""

from __future__ import annotations

import importlib
import math
import random
from itertools import pairwise, product
from typing import Any, ClassVar

import pytest

pytestmark = pytest.mark.usefixtures("examples")


class Chain:
    """A service with a language model of three bytes, in which the probabilities of a byte depend on the previous byte."""

    chances: ClassVar[dict[int, dict[int, float]]] = {
        10: {97: 0.5, 98: 0.4, 10: 0.1},
        97: {97: 0.05, 98: 0.85, 10: 0.1},
        98: {97: 0.3, 98: 0.1, 10: 0.6},
    }

    def __init__(self) -> None:
        self.sessions: dict[str, bytes] = {}

    def fetch_json(self, path: str, body: Any = None, method: str | None = None) -> Any:
        if method == "DELETE":
            return self.sessions.pop(path.split("/")[2])
        if path == "/infer":
            line = self.sessions[body["session"]] = self.sessions.get(body["session"], b"") + bytes(body["inputs"][0])
            chances = self.chances[line[-1]]
            return {"outputs": [{"ids": list(chances), "scores": list(chances.values())}]}
        self.sessions[body["session"]] = self.sessions[path.split("/")[2]]
        return body

    def logarithm(self, line: bytes) -> float:
        return sum(math.log(self.chances[before][after]) for before, after in pairwise(b"\n" + line + b"\n"))


def test_wide_beam_search_finds_the_best_of_all_lines() -> None:
    generate, chain = importlib.import_module("generate"), Chain()
    lines = [bytes(each) for length in range(4) for each in product(b"ab", repeat=length)]
    best = sorted(lines, key=lambda line: chain.logarithm(line) / (len(line) + 1), reverse=True)
    found = generate.search(generate.Writer(chain, "chain"), "", 4, 40)
    assert [line.text for line in found] == best and chain.sessions == {}
    assert [line.logarithm for line in found] == pytest.approx([chain.logarithm(line) for line in best])


def test_narrow_beam_search_keeps_the_most_probable_beams() -> None:
    """Two beams also find the line of a greedy choice of each byte, and a fork does not change the session that it copies."""
    generate, chain = importlib.import_module("generate"), Chain()
    writer = generate.Writer(chain, "chain")
    assert generate.search(writer, "", 9, 2)[0].text == b"ab" and chain.sessions == {}
    beam = writer.begin("a")
    copy = writer.extend(beam, 98, writer.fork(beam.session))
    assert (chain.sessions[beam.session], chain.sessions[copy.session]) == (b"\na", b"\nab")


def test_samples_follow_the_seed_and_begin_with_the_text() -> None:
    generate, chain = importlib.import_module("generate"), Chain()
    one, again, other = (
        [generate.sample(generate.Writer(chain, "chain"), "ab", 9, 1.0, source) for _ in range(5)]
        for source in map(random.Random, (1, 1, 2))
    )
    assert one == again != other and all(line.startswith(b"ab") for line in one) and chain.sessions == {}
    assert generate.main(["--model", "chain", "--url", "http://127.0.0.1:9"]) == 1
