"""Write lines with a served language model over bytes by sampling. Every line is a session that gets one byte in a chunk."""

from __future__ import annotations

import argparse
import random
import sys
from uuid import uuid4

from train_language import BOUNDARY
from training import service
from training.service import Service


def sample(server: Service, model: str, text: str, longest: int, temperature: float, source: random.Random) -> bytes:
    """Return a line that begins with a text, with at most `longest` more bytes.

    temperature: below 1 prefers probable bytes, 1 draws with the model's probabilities.
    """
    session, line = f"writer-{uuid4().hex}", text.encode()
    chunk = [BOUNDARY, *line]
    for _ in range(longest):
        [output] = server.fetch_json("/infer", {"model": model, "session": session, "inputs": [chunk]})["outputs"]
        chunk = source.choices(output["ids"], [chance ** (1 / temperature) for chance in output["scores"]])
        if chunk == [BOUNDARY]:
            break
        line += bytes(chunk)
    server.fetch_json(f"/sessions/{session}/state", method="DELETE")
    return line


def main(line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="name of a language model over bytes")
    parser.add_argument("--text", default="", help="the beginning of the lines")
    parser.add_argument("--lines", type=int, default=3, help="number of lines (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=200, help="bytes after the beginning of a line (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of sampling (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of sampling (default: %(default)s)")
    service.add_flags(parser)
    flags = parser.parse_args(line)
    server, source = Service(flags.url, flags.key_file, flags.ca), random.Random(flags.seed)
    try:
        for _ in range(flags.lines):
            written = sample(server, flags.model, flags.text, flags.longest, flags.temperature, source)
            print(written.decode(errors="replace"))
    except OSError as error:
        print(service.problem(flags, error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
