"""A client with tritonclient over gRPC: `python triton_grpc.py [HOST:PORT]`. pip install "tritonclient[grpc]" """

import os
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

QUESTION = "How far is it from Denver to Aspen ?"
ROWS = [[0.1, -0.4, 0.2], [0.3, -0.4, 0.5], [0.2, -0.3, 0.4]]
Reply = tuple[Any, InferenceServerException | None]


def text(question: str) -> triton.InferInput:
    tensor = triton.InferInput("text", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([question.encode()], dtype=object))
    return tensor


def rows(chunk: list[list[float]]) -> triton.InferInput:
    """Return one sequence: (1, steps, features)."""
    tensor = triton.InferInput("inputs", [1, len(chunk), len(chunk[0])], "FP32")
    tensor.set_data_from_numpy(np.array([chunk], np.float32))
    return tensor


def main(address: str) -> None:
    key = os.environ.get("SEQSERVE_CLIENT_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with triton.InferenceServerClient(address) as client:
        result = client.infer("question-type", [text(QUESTION)], headers=headers)
        print(result.as_numpy("label")[0, 0].decode())

        replies: queue.Queue[Reply] = queue.Queue()  # one call carries all chunks; replies come in their order
        session = f"pump-{os.getpid()}"  # proxies read it in the metadata
        client.start_stream(lambda result, error: replies.put((result, error)), headers=headers | {"x-session-id": session})
        for sent, row in enumerate(ROWS, 1):
            first, last = sent == 1, sent == len(ROWS)
            client.async_stream_infer(
                "sensor-forecast", [rows([row])], sequence_id=session, sequence_start=first, sequence_end=last
            )
        for _ in ROWS:
            result, error = replies.get(timeout=10)
            if error is not None:
                raise error
            steps = result.get_response().parameters["sequence_steps"].int64_param
            print(steps, "steps:", *(f"{x:.3f}" for x in result.as_numpy("value")[0]))
        client.stop_stream()

        try:
            client.infer("nobody", [text("?")], headers=headers)
        except InferenceServerException as error:
            print(f"{error.status()}: {error.message()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001")
