"""`python -m tests.long.triton_caller http|grpc ADDRESS REQUESTS`: call a server with a client library of Triton.

Prints a line after each SAMPLE requests: how many were answered rightly so far, and the resident bytes of this process.
"""

from __future__ import annotations

import gc
import importlib
import random
import sys
from typing import Any

import numpy as np

from tests.accumulator import Account
from tests.steady import resident_bytes

SAMPLE = 5_000
LONGEST = 64


def infer(triton: Any, client: Any, values: list[int]) -> Account:
    """Return the sum and the number of steps that the server reports for a sequence."""
    tensor = triton.InferInput("ids", [1, len(values)], "INT32")
    tensor.set_data_from_numpy(np.array([values], np.int32) + 1)
    result = client.infer("accumulator", [tensor], outputs=[triton.InferRequestedOutput("value")])
    return Account.told(result.as_numpy("value")[0].tolist())


def main(transport: str, address: str, requests: int) -> None:
    triton: Any = importlib.import_module(f"tritonclient.{transport}")
    chance = random.Random(0)
    with triton.InferenceServerClient(address) as client:
        for number in range(1, requests + 1):
            values = chance.choices((-1, 0, 1), k=chance.randint(1, LONGEST))
            told = infer(triton, client, values)
            assert told == Account().plus(values), (told, values)
            if number % SAMPLE == 0:
                gc.collect()  # the garbage of a sample would depend on when the last collection was
                print(number, resident_bytes("self"), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
