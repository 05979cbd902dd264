"""The writer of lines samples from sessions, which it closes."""

from __future__ import annotations

import importlib
import random
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
        self.sessions: set[str] = set()

    def fetch_json(self, path: str, body: Any = None, method: str | None = None) -> Any:
        if method == "DELETE":
            return self.sessions.remove(path.split("/")[2])
        self.sessions.add(body["session"])
        chances = self.chances[body["inputs"][0][-1]]
        return {"outputs": [{"ids": list(chances), "scores": list(chances.values())}]}


def test_samples_follow_the_seed_and_begin_with_the_text() -> None:
    generate, chain = importlib.import_module("generate"), Chain()
    one, again, other = (
        [generate.sample(chain, "chain", "ab", 7, 1.0, source) for _ in range(5)] for source in map(random.Random, (1, 1, 2))
    )
    assert one == again != other and all(line.startswith(b"ab") for line in one) and chain.sessions == set()
    assert max(len(generate.sample(chain, "chain", "", 3, 1.0, random.Random(seed))) for seed in range(20)) == 3
    assert generate.main(["--model", "chain", "--url", "http://127.0.0.1:9"]) == 1
