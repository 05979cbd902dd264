"""A client with tritonclient over HTTP: `python triton_http.py [HOST:PORT]`. pip install "tritonclient[http]" """

import os
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

QUESTION = "How far is it from Denver to Aspen ?"
ROWS = [[0.1, -0.4, 0.2], [0.3, -0.4, 0.5], [0.2, -0.3, 0.4]]


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
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with triton.InferenceServerClient(address) as client:
        result = client.infer("question-type", [text(QUESTION)], headers=headers)
        print(result.as_numpy("label")[0, 0].decode())

        session = f"pump-{os.getpid()}"
        for sent, row in enumerate(ROWS, 1):  # each request is the next chunk of the session
            result = client.infer(
                "sensor-forecast",
                [rows([row])],
                sequence_id=session,
                sequence_start=sent == 1,
                sequence_end=sent == len(ROWS),
                headers={**headers, "x-session-id": session},  # proxies read it
            )
            steps = result.get_response()["parameters"]["sequence_steps"]
            print(steps, "steps:", *(f"{x:.3f}" for x in result.as_numpy("value")[0]))

        try:
            client.infer("nobody", [text("?")], headers=headers)
        except InferenceServerException as error:
            print(f"{error.status()}: {error.message()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8000")
